"""Root-mean-square norm, in the three ways this model weights it.

    centred        rms(x) * (1 + w)       gain = 1 + w
    plain          rms(x) * w             gain = w
    weight first   rms(x * (1 + w))       gain = 1 + w, with `scale_input=True`
    no weight      rms(x)                 gain = None

where rms(x) = x * rsqrt(mean(x^2) + eps) over the last dimension. Everything is computed in
float32 and rounded once, at the end; the gain is formed once in float32 when weights are loaded.
"""

import math
from functools import cache

import torch
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)


def rms_norm_reference(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    *,
    scale_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The formula above, term by term. Arguments as for `rms_norm`."""
    wide = x.to(wide_dtype(x.dtype))
    if gain is not None and scale_input:
        wide = wide * gain
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if gain is not None and not scale_input:
        normed = normed * gain
    return normed.to(out_dtype or x.dtype)


def rms_norm(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    *,
    scale_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """RMS norm of the last dimension.

    Args:
        x: [..., N], any float dtype.
        gain: [N] in float32, or None.
        eps: added to the mean square.
        scale_input: multiply by the gain before the norm instead of after it.
        out_dtype: dtype of the result; x's own if None.

    Returns:
        [..., N] in `out_dtype`, rounded once.
    """
    wide = x.to(wide_dtype(x.dtype)) if gain is None or not scale_input else x * gain
    normed = wide / root_mean_square(wide, eps)
    if gain is not None and not scale_input:
        normed *= gain
    return normed.to(out_dtype or x.dtype)


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps) over the last dimension, kept: [..., N] -> [..., 1].

    As hypot(norm(x) / sqrt(N), sqrt(eps)): on a CPU half the time of squaring and averaging.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.mul_(x.shape[-1] ** -0.5).hypot_(_constant(math.sqrt(eps), x.dtype, x.device))


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    gain_ptr,
    out_ptr,
    width,
    x_stride,
    eps,
    HAS_GAIN: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if HAS_GAIN:
        gain = tl.load(gain_ptr + column, inside, other=0.0)
    wait_for_inputs()
    x = tl.load(x_ptr + row * x_stride + column, inside, other=0.0).to(tl.float32)
    if SCALE_INPUT:
        x *= gain
    normed = x * tl.rsqrt(tl.sum(x * x) / width + eps)
    if HAS_GAIN and not SCALE_INPUT:
        normed *= gain
    tl.store(out_ptr + row * width + column, round_to(normed, out_ptr.dtype.element_ty), inside)


def rms_norm_triton(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    *,
    scale_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`rms_norm` as one kernel; x [T, N] or [N] with contiguous rows."""
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    width = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    assert rows.stride(1) == 1
    block = next_power_of_2(width)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        gain,
        out,
        width,
        rows.stride(0),
        eps,
        HAS_GAIN=gain is not None,
        SCALE_INPUT=scale_input and gain is not None,
        BLOCK=block,
        num_warps=row_warps(block),
        **launch_early(x.device, rows.shape[0]),
    )
    return out


def row_warps(block: int) -> int:
    """Warps for a program that holds a row of `block` elements: about eight elements a thread."""
    return max(1, min(32, block // 256))
