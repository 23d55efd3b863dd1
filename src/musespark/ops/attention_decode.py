"""Attention of one new token per sequence over the paged cache, for a whole batch in one call.

The formula is that of attention_prefill. A sequence's keys lie in the blocks of its row of the
block table, in order of position; the table of a sliding layer begins at the first block that the
window still reaches, so keys carry the position `key_start` onwards.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.attention_prefill import LOG2_E, attend_to_keys, attention_prefill_reference
from musespark.ops.output_gate import norm_and_gate
from musespark.ops.triton_import import (
    dot_in_float32,
    launch_early,
    next_power_of_2,
    num_multiprocessors,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

# Keys of one step of the kernel's loop.
_BLOCK_S = 128
# The most programs that share one sequence's keys.
_MAX_SPLITS = 64


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


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "key_start_ptr", "seq_lens_ptr"],
)
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    key_start_ptr,
    seq_lens_ptr,
    out_ptr,
    part_out_ptr,
    part_sums_ptr,
    gate_ptr,
    query_stride,
    gate_stride,
    table_stride,
    log2_scale,
    window,
    gate_eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """One sequence (axis 0), one key-value head (axis 1), one part of the keys (axis 2).

    With a gate, heads are normed and gated where they are whole: here, or by the kernel below.
    """
    wait_for_inputs()
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    length = tl.load(seq_lens_ptr + sequence)
    first_key = tl.load(key_start_ptr + sequence)
    low = first_key
    if HAS_WINDOW:
        low = tl.maximum(low, length - window)
    # Every part is a whole number of steps, counted from the first visible key.
    steps = tl.cdiv(tl.maximum(length - low, 0), BLOCK_S)
    share = tl.cdiv(steps, SPLITS) * BLOCK_S
    start = low + split * share
    stop = tl.minimum(start + share, length)

    row = tl.arange(0, BLOCK_G)
    d = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP + row
    query = tl.load(
        query_ptr + sequence * query_stride + head[:, None] * HEAD_DIM + d[None, :],
        (row < GROUP)[:, None] & (d >= 0)[None, :],
        other=0.0,
    )
    dtype: tl.constexpr = tl.float32 if IN_FLOAT32 else query.dtype
    # Finite, so that a part without keys stays free of NaN.
    top = tl.full((BLOCK_G,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    out = tl.zeros((BLOCK_G, HEAD_DIM), tl.float32)
    position = tl.zeros((BLOCK_G,), tl.int32) + (length - 1)
    # The window and the query's own position are where the keys start and end: no row hides any.
    top, total, out = attend_to_keys(
        query.to(dtype), position, key_ptr + kv_head * HEAD_DIM, value_ptr + kv_head * HEAD_DIM,
        table_ptr + sequence * table_stride, first_key, start, stop, stop, log2_scale, window,
        top, total, out, KV_HEADS, HEAD_DIM, BLOCK_SIZE, False, False, False, BLOCK_S,
    )  # fmt: skip
    inside = (row < GROUP)[:, None] & (d >= 0)[None, :]
    place = sequence * (KV_HEADS * GROUP) + head
    if SPLITS == 1:
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        if gate_ptr is not None:
            gates = gate_ptr + sequence * gate_stride + head[:, None] * HEAD_DIM + d[None, :]
            out = norm_and_gate(out, tl.load(gates, inside, other=0.0), gate_eps)
        out = round_to(out, out_ptr.dtype.element_ty)
        tl.store(out_ptr + place[:, None] * HEAD_DIM + d[None, :], out, inside)
    else:
        part = place * SPLITS + split
        tl.store(part_out_ptr + part[:, None] * HEAD_DIM + d[None, :], out, inside)
        tl.store(part_sums_ptr + part * 2, top, row < GROUP)
        tl.store(part_sums_ptr + part * 2 + 1, total, row < GROUP)


@triton.jit(do_not_specialize=["num_heads"])
def _combine_kernel(
    part_out_ptr,
    part_sums_ptr,
    out_ptr,
    gate_ptr,
    num_heads,
    gate_stride,
    gate_eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Softmax over parts, of a block of heads: each part has its maximum, its sum, its output.

    All parts are read at once: one after another, each would wait for memory.
    """
    wait_for_inputs()
    head = tl.program_id(0).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, HEAD_DIM)
    inside = head < num_heads
    split = tl.arange(0, SPLITS)
    part = head[:, None] * SPLITS + split[None, :]
    exists = inside[:, None] & (split >= 0)[None, :]
    tops = tl.load(part_sums_ptr + part * 2, exists, other=0.0)
    sums = tl.load(part_sums_ptr + part * 2 + 1, exists, other=0.0)
    outs = tl.load(
        part_out_ptr + part[:, :, None] * HEAD_DIM + d[None, None, :],
        exists[:, :, None] & (d >= 0)[None, None, :],
        other=0.0,
    )
    factors = tl.exp2(tops - tl.max(tops, axis=1)[:, None])
    total = tl.sum(factors * sums, axis=1)
    out = tl.sum(factors[:, :, None] * outs, axis=1)
    out = out / tl.where(total > 0, total, 1.0)[:, None]
    if gate_ptr is not None:
        gates = gate_ptr + (head // HEADS) * gate_stride + head % HEADS * HEAD_DIM
        gate = tl.load(gates[:, None] + d[None, :], inside[:, None] & (d >= 0)[None, :], other=0.0)
        out = norm_and_gate(out, gate, gate_eps)
    tl.store(
        out_ptr + head[:, None] * HEAD_DIM + d[None, :],
        round_to(out, out_ptr.dtype.element_ty),
        inside[:, None] & (d >= 0)[None, :],
    )


def attention_decode_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    key_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    gate: Tensor | None = None,
    gate_eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's newest token, split over its keys.

    Args:
        query: [B, heads, head_dim].
        key_cache, value_cache: [blocks, block_size, kv_heads, head_dim], in query's dtype or an
            8-bit float.
        block_table: [B, N] integer; entries behind a sequence's last block are not read.
        key_start: [B] int32 position of the first key of a sequence's first block in the table.
        seq_lens: [B] int32 tokens so far, the newest included; 0: a row that is padding, which
            gets zeros.
        scale: multiplies the scores before the softmax.
        window: keys a query sees, its own included; None: all.
        gate: [B, heads, head_dim] or None; norms and gates the result, as `output_gate` does.
        gate_eps: of that norm.
        out: [B, heads, head_dim] to write to.

    Returns:
        [B, heads, head_dim] in query's dtype. head_dim must be a power of two.
    """
    num_sequences, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if not num_sequences:
        return out
    assert head_dim == next_power_of_2(head_dim)
    assert query.stride()[1:] == (head_dim, 1)
    assert block_table.stride(1) == 1
    assert out.is_contiguous()
    group = num_heads // num_kv_heads
    gate_stride = 0 if gate is None else gate.stride(0)
    splits = _num_splits(num_sequences * num_kv_heads, num_multiprocessors(query.device))
    part_out = part_sums = None
    if splits > 1:
        parts = (num_sequences, num_heads, splits)
        part_out = torch.empty((*parts, head_dim), dtype=torch.float32, device=query.device)
        part_sums = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    _decode_kernel[(num_sequences, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_table,
        key_start,
        seq_lens,
        out,
        part_out,
        part_sums,
        gate,
        query.stride(0),
        gate_stride,
        block_table.stride(0),
        scale * LOG2_E,
        0 if window is None else window,
        gate_eps,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        HAS_WINDOW=window is not None,
        SPLITS=splits,
        BLOCK_G=max(16, next_power_of_2(group)),
        BLOCK_S=_BLOCK_S,
        IN_FLOAT32=dot_in_float32(query.dtype),
        num_warps=4,
        num_stages=3,
        **launch_early(query.device, num_sequences),
    )
    if splits > 1:
        block_h = 1
        total_heads = num_sequences * num_heads
        _combine_kernel[(-(-total_heads // block_h),)](
            part_out,
            part_sums,
            out,
            gate,
            total_heads,
            gate_stride,
            gate_eps,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            BLOCK_H=block_h,
            num_warps=4,
            **launch_early(query.device, num_sequences),
        )
    return out


def _num_splits(num_programs: int, num_cores: int) -> int:
    """Parts of the keys, so that every core has about four programs; a power of two."""
    wanted = max(1, 4 * num_cores // num_programs)
    return min(_MAX_SPLITS, next_power_of_2(wanted + 1) // 2)
