"""Attention of a few new tokens per sequence over the paged cache, for many sequences in one call.

For sequences that verify guesses: they are too short to be worth a call each. The formula is that
of attention_prefill. Sequences are padded to the longest one's number of new tokens by repeating
their last one.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.attention_decode import gather_blocks
from musespark.ops.attention_prefill import attention_prefill_reference


@dataclass(frozen=True, slots=True)
class FewTokens:
    """F sequences, whose R new tokens lie one after the other, and what those see."""

    block_table: Tensor
    """[F, M] int64 blocks of each sequence; entries behind its last may be any valid block."""
    rows: Tensor
    """[F, N] int64 which of the R tokens each new one is; a shorter sequence repeats its last."""
    kept: Tensor
    """[R] int64 where each token stands among the F * N."""
    mask: Tensor
    """[F, N, M * block_size] bool: the keys that each token sees."""


def few_tokens(
    block_table: Tensor,
    block_size: int,
    key_start: Tensor,
    seq_lens: Tensor,
    counts: Tensor,
    window: int | None,
) -> FewTokens:
    """What a step's tokens of such sequences see, the same for all layers of a kind.

    Args:
        block_table: [F, M] int64.
        block_size: of the cache.
        key_start: [F] position of the first key in each sequence's first block of the table.
        seq_lens: [F] tokens of each sequence, new ones included.
        counts: [F] new tokens of each, at least 1.
        window: keys a token sees, its own included; None: all up to its own.
    """
    device, most = block_table.device, int(counts.max())
    step = torch.arange(most, device=device)
    place = step.minimum(counts[:, None] - 1)  # [F, N]
    rows = place + (counts.cumsum(0) - counts)[:, None]
    kept = (step < counts[:, None]).flatten().nonzero()[:, 0]
    query = (seq_lens - counts)[:, None] + place  # [F, N] positions
    key = torch.arange(block_table.shape[1] * block_size, device=device) + key_start[:, None]
    mask = key[:, None] <= query[:, :, None]
    if window is not None:
        mask &= key[:, None] > query[:, :, None] - window
    return FewTokens(block_table, rows, kept, mask)


def attention_few_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, few: FewTokens, scale: float
) -> Tensor:
    """Token by token, through the prefill reference. Arguments as for `attention_few`."""
    out = torch.empty_like(query)
    for blocks, rows, mask in zip(few.block_table, few.rows, few.mask, strict=True):
        key, value = (
            gather_blocks(cache, blocks).to(query.dtype) for cache in (key_cache, value_cache)
        )
        for row, seen in zip(rows.tolist(), mask, strict=True):
            own = slice(row, row + 1)
            out[own] = attention_prefill_reference(query[own], key[seen], value[seen], scale)
    return out


def attention_few(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, few: FewTokens, scale: float
) -> Tensor:
    """Attention of the sequences' new tokens.

    Args:
        query: [R, heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], the new tokens' own keys
            and values included.
        few: from `few_tokens`.
        scale: multiplies the scores before the softmax.

    Returns:
        [R, heads, head_dim] in query's dtype.
    """
    num_kv_heads, (_, count) = key_cache.shape[2], few.rows.shape
    group = query.shape[1] // num_kv_heads
    key, value = (
        gather_blocks(cache, few.block_table).to(query.dtype).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )  # [F, kv_heads, S, head_dim]
    # The heads that share a key stand as rows beside the tokens.
    padded = query.index_select(0, few.rows.flatten()).unflatten(0, (-1, count))
    grouped = padded.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = few.mask[:, None].repeat(1, 1, group, 1)  # [F, 1, group * N, S]
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    out = out.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4)  # [F, N, kv_heads, group, :]
    return out.flatten(2, 3).flatten(0, 1).index_select(0, few.kept)
