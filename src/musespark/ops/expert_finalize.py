"""From the experts' rows to one row per token: norm per route, weighted sum over routes.

    out[t] = b( sum_k  w[t, k] * rms(rows[index[t, k]] * gain, eps) )

Weight first, then the norm; the sum runs in float32, in slot order, and is rounded once. A route
whose index is -1 belongs to another rank: its row is never read, since that memory may hold NaN.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.rms_norm import rms_norm
from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    num_multiprocessors,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

# Of a multiprocessor's shared memory, for rows on their way.
_FETCHED_BYTES = 192 * 1024
# Up to so many tokens a multiprocessor, a program for each is faster than programs that take
# several in turn.
_TOKENS_AT_ONCE = 4
# Bounds the float32 intermediate of one chunk to 128 MiB.
_CHUNK_ELEMENTS = 32 * 2**20


def tokens_per_chunk(top_k: int, width: int) -> int:
    """How many tokens are handled at once."""
    rows = max(top_k, _CHUNK_ELEMENTS // max(width, 1))
    return max(1, rows // top_k)


def expert_finalize_reference(
    rows: Tensor,
    route_weights: Tensor,
    route_index: Tensor,
    gain: Tensor,
    eps: float,
    *,
    variance_size: int | None = None,
    reduce_rows: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The formula above, in chunks of tokens; does more than the kernel.

    Args:
        rows, route_weights, route_index, gain, eps: as for `expert_finalize`.
        variance_size: the mean square is of a row's first so many elements; None: of all.
        reduce_rows: sums a chunk's rows [N, H], in the order of the routes, over the ranks whose
            rows are partial sums. Called equally often on all of them.
    """
    num_tokens, top_k = route_index.shape
    out = rows.new_empty((num_tokens, rows.shape[-1]))
    chunk = tokens_per_chunk(top_k, rows.shape[-1])
    for start in range(0, num_tokens, chunk):
        part = slice(start, min(start + chunk, num_tokens))
        picked = _pick_rows(rows, route_index[part].flatten())
        if reduce_rows is not None:
            picked = reduce_rows(picked)
        normed = _norm(picked, gain, eps, variance_size).view(*route_index[part].shape, -1)
        normed = normed * route_weights[part].to(normed.dtype)[..., None]
        out[part] = normed.sum(dim=1)
    return out


def expert_finalize(
    rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
) -> Tensor:
    """Norm, weight and sum the experts' output rows.

    Args:
        rows: [R, H] in the compute dtype, the second GEMM's output.
        route_weights: [T, K] float32.
        route_index: [T, K] integer row of each route, -1 where another rank has it.
        gain: [H] float32, multiplied into a row before its norm.
        eps: of the norm.

    Returns:
        [T, H] in rows' dtype.
    """
    return expert_finalize_reference(rows, route_weights, route_index, gain, eps)


def _pick_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zero where the index is -1."""
    if not rows.shape[0]:
        return rows.new_zeros((index.shape[0], rows.shape[-1]))  # every route is elsewhere
    picked = rows.index_select(0, index.clamp_min(0))
    return picked.masked_fill_((index < 0)[:, None], 0)


def _norm(rows: Tensor, gain: Tensor, eps: float, variance_size: int | None) -> Tensor:
    """rms(rows * gain) in float32."""
    wide = wide_dtype(rows.dtype)
    if variance_size is None:
        return rms_norm(rows, gain, eps, scale_input=True, out_dtype=wide)
    scaled = rows.to(wide) * gain
    mean_square = scaled[:, :variance_size].square().mean(dim=-1, keepdim=True)
    return scaled * torch.rsqrt(mean_square + eps)


@triton.jit
def _finalize_token(
    token,
    rows_ptr,
    weights_ptr,
    index_ptr,
    gain,
    out_ptr,
    width,
    row_stride,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """A token's K rows are one tile, so that their K means cost one reduction.

    Each thread holds the same columns of every row and sums over the routes by itself.
    """
    slot = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK)
    inside = column < width
    route = tl.cast(token, tl.int64) * TOP_K + slot
    index = tl.load(index_ptr + route, slot < TOP_K, other=-1).to(tl.int64)
    weight = tl.load(weights_ptr + route, slot < TOP_K, other=0.0)
    here = index >= 0
    rows = tl.load(
        rows_ptr + index[:, None] * row_stride + column[None, :],
        here[:, None] & inside[None, :],
        other=0.0,
        eviction_policy=EVICTION,
    )
    scaled = rows.to(tl.float32) * gain[None, :]
    factor = tl.rsqrt(tl.sum(scaled * scaled, axis=1) / width + eps)
    factor = tl.where(here, weight * factor, 0.0)
    total = tl.sum(scaled * factor[:, None], axis=0)
    offset = tl.cast(token, tl.int64) * width + column
    tl.store(out_ptr + offset, round_to(total, out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _finalize_kernel(
    rows_ptr,
    weights_ptr,
    index_ptr,
    gain_ptr,
    out_ptr,
    num_tokens,
    width,
    row_stride,
    eps,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """One token by each program; with STAGES, token program_id, program_id + num_programs, ...

    While one of those is computed, the rows of the next ones are on their way.
    """
    column = tl.arange(0, BLOCK)
    gain = tl.load(gain_ptr + column, column < width, other=0.0)
    wait_for_inputs()
    if STAGES == 0:
        _finalize_token(
            tl.program_id(0), rows_ptr, weights_ptr, index_ptr, gain, out_ptr, width, row_stride,
            eps, TOP_K, BLOCK_K, BLOCK, EVICTION,
        )  # fmt: skip
    else:
        for token in tl.range(tl.program_id(0), num_tokens, tl.num_programs(0), num_stages=STAGES):
            _finalize_token(
                token, rows_ptr, weights_ptr, index_ptr, gain, out_ptr, width, row_stride,
                eps, TOP_K, BLOCK_K, BLOCK, EVICTION,
            )  # fmt: skip


def expert_finalize_triton(
    rows: Tensor, route_weights: Tensor, route_index: Tensor, gain: Tensor, eps: float
) -> Tensor:
    """`expert_finalize` as one kernel."""
    num_tokens, top_k = route_index.shape
    width = rows.shape[-1]
    out = rows.new_empty((num_tokens, width))
    if not out.numel():
        return out
    assert rows.stride(1) == 1
    assert route_weights.is_contiguous()
    assert route_index.is_contiguous()
    block, block_k = next_power_of_2(width), next_power_of_2(top_k)
    cores = num_multiprocessors(rows.device)
    programs, warps, stages = num_tokens, block // 256, 0
    if num_tokens > _TOKENS_AT_ONCE * cores:
        # One tile is computed while others, in shared memory, are on their way.
        tile_bytes = block * block_k * rows.element_size()
        programs, warps, stages = cores, block // 512, 1 + min(2, _FETCHED_BYTES // tile_bytes)
    elif num_tokens > cores:
        warps = block // 1024  # several programs share a multiprocessor
    _finalize_kernel[(programs,)](
        rows,
        route_weights,
        route_index,
        gain,
        out,
        num_tokens,
        width,
        rows.stride(0),
        eps,
        TOP_K=top_k,
        BLOCK_K=block_k,
        BLOCK=block,
        STAGES=stages,
        # Rows are read once; while they fit in the cache, the hint only costs.
        EVICTION="evict_first" if num_tokens > cores else "",
        num_warps=max(1, min(16, warps)),
        **launch_early(rows.device, num_tokens),
    )
    return out
