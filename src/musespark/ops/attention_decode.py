"""Attention of one new token per sequence over the paged cache, for a whole batch in one call.

The formula is that of attention_prefill. A sequence's keys lie in the blocks of its row of the
block table, in order of position; the table of a sliding layer begins at the first block that the
window still reaches, so keys carry the position `key_start` onwards.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.attention_prefill import attention_prefill_reference


def gather_blocks(cache: Tensor, block_table: Tensor) -> Tensor:
    """Rows of a cache [blocks, block_size, ...] in the order of a table [..., N] of its blocks.

    Returns:
        [..., N * block_size, kv_heads, head_dim].
    """
    picked = cache.index_select(0, block_table.flatten())
    num_rows = block_table.shape[-1] * cache.shape[1]
    return picked.view(*block_table.shape[:-1], num_rows, *cache.shape[2:])


def attention_decode_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    key_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Sequence by sequence, through the prefill reference. Arguments as for `attention_decode`."""
    out = torch.empty_like(query)
    for row in range(query.shape[0]):
        first, length = int(key_start[row]), int(seq_lens[row])
        key = gather_blocks(key_cache, block_table[row])[: length - first]
        value = gather_blocks(value_cache, block_table[row])[: length - first]
        out[row] = attention_prefill_reference(
            query[row : row + 1], key.to(query.dtype), value.to(query.dtype), scale, window
        )[0]
    return out


def decode_mask(
    block_table: Tensor, block_size: int, key_start: Tensor, seq_lens: Tensor, window: int | None
) -> Tensor:
    """[B, N * block_size] bool: the gathered keys that each sequence's newest token sees."""
    num_keys = block_table.shape[1] * block_size
    position = torch.arange(num_keys, device=block_table.device)[None] + key_start[:, None]
    mask = position < seq_lens[:, None]
    return mask if window is None else mask & (position >= (seq_lens - window)[:, None])


def attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each sequence's newest token.

    Args:
        query: [B, heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], the newest token's own
            key and value included.
        block_table: [B, N] int64; entries behind a sequence's last block may be any valid block.
        mask: [B, N * block_size] bool from `decode_mask`, the same for all layers of a kind.
        scale: multiplies the scores before the softmax.

    Returns:
        [B, heads, head_dim] in query's dtype.
    """
    num_kv_heads = key_cache.shape[2]
    key = gather_blocks(key_cache, block_table).transpose(1, 2)  # [B, kv_heads, S, head_dim]
    value = gather_blocks(value_cache, block_table).transpose(1, 2)
    # The heads that share a key-value head are the rows of one small query matrix.
    grouped = query.unflatten(1, (num_kv_heads, -1))  # [B, kv_heads, group, head_dim]
    out = F.scaled_dot_product_attention(
        grouped, key.to(query.dtype), value.to(query.dtype), mask[:, None, None], scale=scale
    )
    return out.flatten(1, 2)
