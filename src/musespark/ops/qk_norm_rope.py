"""QK-norm without a weight, then rotary embedding (or none), on heads as the projections give them.

    x = b(rms(x, eps))                         one rounding
    (x1, x2) = halves of x
    x = b([x1 cos - x2 sin, x2 cos + x1 sin])  float32 inside, one rounding

A checkpoint stores each head's rows as [first halves | second halves], so halves rotate. The
query's extra scale is not here: it is folded into the softmax scale.
"""

import torch
from torch import Tensor

from musespark.ops.kv_write import kv_write, store_cached
from musespark.ops.rms_norm import rms_norm, rms_norm_reference
from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

# Heads that one program handles.
_HEADS = 16


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves in float32. x: [T, heads, head_dim]; cos, sin: [T, head_dim / 2]."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def qk_norm_rope_reference(qk: Tensor, eps: float, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """The formulas above. Arguments as for `qk_norm_rope`."""
    normed = rms_norm_reference(qk, None, eps)
    return normed if angles is None else rotate(normed, *angles)


def qk_norm_rope(qk: Tensor, eps: float, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """Norm every head, then rotate it.

    Args:
        qk: [T, heads, head_dim], query and key heads side by side.
        eps: of the norm.
        angles: (cos, sin), each [T, head_dim / 2] float32; None on a layer without RoPE.

    Returns:
        [T, heads, head_dim] in qk's dtype.
    """
    normed = rms_norm(qk, None, eps)
    return normed if angles is None else rotate(normed, *angles)


def qk_norm_rope_write(
    qkv: Tensor,
    num_heads: int,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys; keys and values go to the paged cache.

    Args:
        qkv: [T, num_heads + 2 * kv_heads, head_dim], query, key and value heads side by side.
        num_heads: how many of them are query heads.
        eps, angles: as for `qk_norm_rope`.
        key_cache, value_cache, slot_mapping: as for `kv_write`; a token with slot -1 is not
            written by the kernel.

    Returns:
        The queries [T, num_heads, head_dim].
    """
    num_kv_heads = key_cache.shape[2]
    qk, value = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    query, key = qk_norm_rope(qk, eps, angles).split((num_heads, num_kv_heads), dim=1)
    kv_write(key, value, key_cache, value_cache, slot_mapping)
    return query


@triton.jit
def _normed_halves(heads_ptr, half, inside, eps, dtype: tl.constexpr, HALF: tl.constexpr):
    """rms of heads [N], as two halves [N, HALF], rounded to `dtype` and widened again."""
    first = tl.load(heads_ptr + half, inside, other=0.0).to(tl.float32)
    second = tl.load(heads_ptr + HALF + half, inside, other=0.0).to(tl.float32)
    square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    factor = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
    return round_to(first * factor, dtype).to(tl.float32), round_to(second * factor, dtype).to(
        tl.float32
    )


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slot_ptr"])
def _qk_norm_rope_write_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    num_slots,
    token_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """One token per program (axis 0); axis 1: blocks of query heads, then blocks of key heads."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, HALF)[None, :]
    HEAD_DIM: tl.constexpr = 2 * HALF
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    is_query = block < QUERY_BLOCKS
    first_head = tl.where(is_query, block, block - QUERY_BLOCKS) * BLOCK_HEADS
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    inside = (head < tl.where(is_query, HEADS, KV_HEADS)) & (half >= 0)
    source = qkv_ptr + token * token_stride
    heads = source + (head + tl.where(is_query, 0, HEADS)) * HEAD_DIM
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    first, second = _normed_halves(heads, half, inside, eps, dtype, HALF)
    if ROTATE:
        cos = tl.load(cos_ptr + token * HALF + half)
        sin = tl.load(sin_ptr + token * HALF + half)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    # What is stored in an 8-bit cache is rounded to the compute dtype first.
    first, second = round_to(first, dtype), round_to(second, dtype)
    if is_query:
        target = query_ptr + (token * HEADS + head) * HEAD_DIM
        tl.store(target + half, first, inside)
        tl.store(target + HALF + half, second, inside)
    else:
        slot = tl.load(slot_ptr + token, token < num_slots, other=-1)
        if slot >= 0:
            values = source + (HEADS + KV_HEADS + head) * HEAD_DIM
            place = (slot * KV_HEADS + head) * HEAD_DIM + half
            store_cached(key_cache_ptr + place, first, inside)
            store_cached(key_cache_ptr + HALF + place, second, inside)
            first_value = tl.load(values + half, inside, other=0.0)
            second_value = tl.load(values + HALF + half, inside, other=0.0)
            store_cached(value_cache_ptr + place, first_value, inside)
            store_cached(value_cache_ptr + HALF + place, second_value, inside)


def qk_norm_rope_write_triton(
    qkv: Tensor,
    num_heads: int,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """`qk_norm_rope_write` as one kernel; head_dim must be a power of two."""
    num_tokens, _, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    query = qkv.new_empty((num_tokens, num_heads, head_dim))
    if not num_tokens:
        return query
    assert head_dim == next_power_of_2(head_dim)
    assert qkv.stride()[1:] == (head_dim, 1)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    cos, sin = (None, None) if angles is None else angles
    blocks = -(-num_heads // _HEADS) + -(-num_kv_heads // _HEADS)
    _qk_norm_rope_write_kernel[(num_tokens, blocks)](
        qkv,
        cos,
        sin,
        slot_mapping,
        query,
        key_cache,
        value_cache,
        slot_mapping.shape[0],
        qkv.stride(0),
        eps,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=_HEADS,
        ROTATE=angles is not None,
        num_warps=4,
        **launch_early(qkv.device, num_tokens),
    )
    return query
