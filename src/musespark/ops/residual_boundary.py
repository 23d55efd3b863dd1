"""The boundary between two sub-layers: post-norm, gated blend, pre-norm, in one step.

    stream' = alpha * stream + beta * rms(branch * post_gain, post_eps)
    normed  = rms(stream', pre_eps) * pre_gain

The stream is float32 and never rounded; the normed branch is not rounded either. Only `normed`,
the next sub-layer's input, is rounded to the compute dtype, once.
"""

import torch
from torch import Tensor

from musespark.ops.rms_norm import rms_norm, rms_norm_reference, root_mean_square, row_warps
from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    num_multiprocessors,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)


def blend_reference(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
) -> Tensor:
    """The first formula above. Arguments as for `residual_boundary`."""
    post = rms_norm_reference(branch, post_gain, post_eps, scale_input=True, out_dtype=stream.dtype)
    return alpha * stream + beta * post


def residual_boundary_reference(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
) -> tuple[Tensor, Tensor]:
    """Both formulas above. Arguments as for `residual_boundary`."""
    stream = blend_reference(stream, branch, alpha, beta, post_gain, post_eps)
    return rms_norm_reference(stream, pre_gain, pre_eps, out_dtype=branch.dtype), stream


def blend(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
) -> Tensor:
    """The new stream [T, D] float32, without the next pre-norm. Arguments as below."""
    wide = branch.to(stream.dtype) if post_gain is None else branch * post_gain
    root = root_mean_square(wide, post_eps)
    return (alpha * stream).addcdiv_(wide * beta, root)


def residual_boundary(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
) -> tuple[Tensor, Tensor]:
    """Blend a branch into the stream and norm the result for the next sub-layer.

    Args:
        stream: [T, D] float32, the residual stream before the blend.
        branch: [T, D] in the compute dtype, what the sub-layer returned.
        alpha, beta: [D] float32, from `residual_gate`.
        post_gain: [D] float32, multiplied into the branch before its norm; None: no weight.
        post_eps: of the branch's norm.
        pre_gain: [D] float32, of the next sub-layer's input norm.
        pre_eps: of that norm.

    Returns:
        (normed [T, D] in branch's dtype, new stream [T, D] float32).
    """
    stream = blend(stream, branch, alpha, beta, post_gain, post_eps)
    return rms_norm(stream, pre_gain, pre_eps, out_dtype=branch.dtype), stream


@triton.jit(do_not_specialize=["num_rows"])
def _boundary_kernel(
    stream_ptr,
    branch_ptr,
    alpha_ptr,
    beta_ptr,
    post_gain_ptr,
    pre_gain_ptr,
    new_stream_ptr,
    normed_ptr,
    wide_normed_ptr,
    num_rows,
    width,
    branch_stride,
    post_eps,
    pre_eps,
    HAS_POST_GAIN: tl.constexpr,
    HAS_PRE_NORM: tl.constexpr,
    HAS_WIDE_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    STREAM_STORE: tl.constexpr,
):
    """Rows program_id, program_id + num_programs, ... by one program.

    The four vectors of the channels are larger than a row, so each program reads them once and
    keeps them in registers; while one row is computed, the next ones are on their way.
    """
    column = tl.arange(0, BLOCK)
    inside = column < width
    alpha = tl.load(alpha_ptr + column, inside, other=0.0)
    beta = tl.load(beta_ptr + column, inside, other=0.0)
    if HAS_POST_GAIN:
        post_gain = tl.load(post_gain_ptr + column, inside, other=0.0)
    if HAS_PRE_NORM:
        pre_gain = tl.load(pre_gain_ptr + column, inside, other=0.0)
    wait_for_inputs()
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        offset = tl.cast(row, tl.int64) * width + column
        branch_offset = tl.cast(row, tl.int64) * branch_stride + column
        stream = tl.load(stream_ptr + offset, inside, other=0.0)
        branch = tl.load(branch_ptr + branch_offset, inside, other=0.0).to(tl.float32)
        if HAS_POST_GAIN:
            branch *= post_gain
        post = branch * tl.rsqrt(tl.sum(branch * branch) / width + post_eps)
        stream = alpha * stream + beta * post
        tl.store(new_stream_ptr + offset, stream, inside, cache_modifier=STREAM_STORE)
        if HAS_PRE_NORM:
            normed = stream * tl.rsqrt(tl.sum(stream * stream) / width + pre_eps) * pre_gain
            tl.store(normed_ptr + offset, round_to(normed, normed_ptr.dtype.element_ty), inside)
            if HAS_WIDE_NORMED:
                tl.store(wide_normed_ptr + offset, normed, inside)


def _launch_boundary(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor | None,
    pre_eps: float,
    normed: Tensor | None,
    wide_normed: Tensor | None,
) -> Tensor:
    """Fill `normed` and `wide_normed` where they are given; returns the new stream."""
    num_rows, width = stream.shape
    new_stream = torch.empty_like(stream)
    if not new_stream.numel():
        return new_stream
    assert stream.is_contiguous()
    assert branch.stride(1) == 1
    block = next_power_of_2(width)
    programs = num_multiprocessors(stream.device)
    is_pipelined = num_rows > programs
    _boundary_kernel[(min(num_rows, programs),)](
        stream,
        branch,
        alpha,
        beta,
        post_gain,
        pre_gain,
        new_stream,
        normed,
        wide_normed,
        num_rows,
        width,
        branch.stride(0),
        post_eps,
        pre_eps,
        HAS_POST_GAIN=post_gain is not None,
        HAS_PRE_NORM=normed is not None,
        HAS_WIDE_NORMED=wide_normed is not None,
        BLOCK=block,
        STAGES=3 if is_pipelined else 1,
        # Many rows of the stream are out of the cache before anybody reads them, so let them go
        # first: on an H200 2048 rows take 58 instead of 61 us.
        STREAM_STORE=".cs" if is_pipelined else "",
        # More threads wait longer for each other: on an H200 32 warps take 5.4 us for one row of
        # 8192 (8 warps: 4.6) and 68 us for 2048 rows (16 warps: 57).
        num_warps=min(16 if is_pipelined else 8, row_warps(block)),
        **launch_early(stream.device, num_rows),
    )
    return new_stream


def blend_triton(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
) -> Tensor:
    """`blend` as one kernel."""
    return _launch_boundary(stream, branch, alpha, beta, post_gain, post_eps, None, 0.0, None, None)


def residual_boundary_triton(
    stream: Tensor,
    branch: Tensor,
    alpha: Tensor,
    beta: Tensor,
    post_gain: Tensor | None,
    post_eps: float,
    pre_gain: Tensor,
    pre_eps: float,
    *,
    wide_normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`residual_boundary` as one kernel; `wide_normed` [T, D] float32 takes an unrounded copy."""
    normed = torch.empty_like(branch, memory_format=torch.contiguous_format)
    new_stream = _launch_boundary(
        stream,
        branch,
        alpha,
        beta,
        post_gain,
        post_eps,
        pre_gain,
        pre_eps,
        normed,
        wide_normed,
    )
    return normed, new_stream
