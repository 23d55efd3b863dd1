"""Attention of a few new tokens per sequence whose own keys are not in the paged cache.

For a draft's block: N tokens of each sequence, at the positions behind its cached ones, see the
cache and one another. Their keys and values are arguments and leave no trace in the cache.

    visible(i, j) = position_j > position_i - window  and
                    (j is cached, or position_j <= position_i, or the block is not causal)

What is visible where is computed once for all layers with the same window. Nothing here asks the
device for a number, so that a CUDA graph can record it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.attention_decode import gather_blocks


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the tokens of a step's blocks see."""

    block_table: Tensor
    """[B, M] int64 blocks that any of a sequence's tokens may see."""
    mask: Tensor
    """[B, N, M * block_size + N] bool: cached keys, then the block's own."""


def block_view(
    block_table: Tensor,
    block_size: int,
    key_start: Tensor,
    context_lens: Tensor,
    num_tokens: int,
    window: int | None,
    *,
    causal: bool = True,
) -> BlockView:
    """What each token of a block sees.

    Args:
        block_table: [B, M] int64; entries behind a sequence's last block may be any valid block.
        block_size: of the cache.
        key_start: [B] position of the first key in each sequence's first block of the table.
        context_lens: [B] cached tokens of each sequence, which is its block's first position.
        num_tokens: N, tokens of a block.
        window: keys a token sees, its own included; None: all.
        causal: whether a block's tokens see only those before them in the block.
    """
    device = block_table.device
    column = torch.zeros_like(context_lens)[:, None]
    width = block_table.shape[1]
    if window is not None:
        # The first column that the block's first token, which sees furthest back, still sees.
        first = (context_lens - window + 1 - key_start).clamp_min(0) // block_size
        width = min(width, (window - 2) // block_size + 2)
        column = first[:, None]
    columns = column + torch.arange(width, device=device)  # [B, M]
    table = block_table.gather(1, columns.clamp_max(block_table.shape[1] - 1))
    key = columns[:, :, None] * block_size + torch.arange(block_size, device=device)
    key = key.flatten(1) + key_start[:, None]  # [B, M * block_size] positions
    steps = torch.arange(num_tokens, device=device)
    query = context_lens[:, None] + steps  # [B, N] positions
    mask = (key < context_lens[:, None])[:, None].expand(-1, num_tokens, -1)
    own = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    if causal:
        own = own.tril()
    if window is not None:
        mask = mask & (key[:, None] > query[:, :, None] - window)
        own = own & (steps > steps[:, None] - window)
    own = own.expand(len(context_lens), -1, -1)
    return BlockView(table, torch.cat((mask, own), dim=-1))


def attention_block_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    view: BlockView,
    scale: float,
) -> Tensor:
    """Head by head. Arguments as for `attention_block`."""
    out = torch.empty_like(query)
    group = query.shape[2] // key.shape[2]
    for row, (blocks, mask) in enumerate(zip(view.block_table, view.mask, strict=True)):
        for head in range(query.shape[2]):
            shared = head // group
            keys, values = (
                torch.cat(
                    (cache[blocks, :, shared].flatten(0, 1).to(own.dtype), own[row, :, shared])
                )
                for cache, own in ((key_cache, key), (value_cache, value))
            )
            scores = (query[row, :, head] @ keys.T * scale).masked_fill(~mask, -torch.inf)
            out[row, :, head] = scores.softmax(dim=-1) @ values
    return out


def attention_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    view: BlockView,
    scale: float,
) -> Tensor:
    """Attention of each sequence's block.

    Args:
        query: [B, N, heads, head_dim].
        key, value: [B, N, kv_heads, head_dim], the block's own.
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim].
        view: from `block_view`.
        scale: multiplies the scores before the softmax.

    Returns:
        [B, N, heads, head_dim] in query's dtype.
    """
    num_kv_heads = key.shape[2]
    group = query.shape[2] // num_kv_heads
    keys, values = (
        torch.cat((gather_blocks(cache, view.block_table).to(own.dtype), own), dim=1).transpose(
            1, 2
        )
        for cache, own in ((key_cache, key), (value_cache, value))
    )  # [B, kv_heads, S, head_dim]
    # The heads that share a key stand as rows beside the tokens.
    rows = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = view.mask[:, None].repeat(1, 1, group, 1)  # [B, 1, group * N, S]
    out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)
