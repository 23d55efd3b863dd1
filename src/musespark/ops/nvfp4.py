"""NVFP4: four-bit floats with one eight-bit scale per 16 of them.

    value = e2m1(code) * e4m3(block scale) * global scale

e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, and a sign in bit 3. Two codes share a byte,
the even index in the low nibble. Block scales are e4m3 floats, subnormals included; the global
scale is float32. e2m1 times e4m3 has at most six significant bits: the product is exact in
bfloat16 and in anything wider, so only the global scale ever rounds.
"""

from typing import Literal

import torch
from torch import Tensor

GROUP_SIZE = 16
"""Inputs that share a block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
LARGEST = E2M1_MAX * E4M3_MAX
"""The largest magnitude before the global scale: a global scale is amax / LARGEST."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

ScaleChoice = Literal["max", "mse"]
"""How a block's scale is found: from its largest magnitude, or by least squared error."""

# Steps along the e4m3 codes, eight to a binade, from the scale of "max": what "mse" tries. Clipping
# the largest magnitude pays for one code, widening for most of a binade: a wider search gains less
# than 0.1% of the error on normal and on heavy-tailed data.
_MSE_STEPS = range(-1, 7)
_LARGEST_E4M3_CODE = 126  # 448; code 127 is NaN

# 1.5 * 2^23: float32 numbers of this size are 1 apart.
_ROUNDER = 12582912.0


def e2m1_values(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """The value of each of the 16 codes."""
    signed = [*E2M1_MAGNITUDES, *(-magnitude for magnitude in E2M1_MAGNITUDES)]
    return torch.tensor(signed, dtype=dtype, device=device)


def e4m3_values(dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """The value of each of the 256 codes of float8_e4m3fn; two of them are NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)


def pack_codes(codes: Tensor) -> Tensor:
    """[..., N] uint8 codes 0..15 -> [..., N / 2] bytes."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """[..., N / 2] bytes -> [..., N] uint8 codes 0..15."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize(packed: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """e2m1 times block scale, without the global scale: exact.

    Args:
        packed: [..., N / 2] uint8.
        scales: [..., N / 16] float8_e4m3fn.
        dtype: bfloat16, float32 or float64.

    Returns:
        [..., N] in `dtype`.
    """
    magnitudes = e2m1_values(dtype, packed.device)[unpack_codes(packed).int()]
    blocks = magnitudes.unflatten(-1, (-1, GROUP_SIZE))
    return (blocks * scales.to(torch.float32).to(dtype)[..., None]).flatten(-2)


def quantize(
    x: Tensor, global_scale: Tensor | float, choice: ScaleChoice = "max"
) -> tuple[Tensor, Tensor]:
    """Round to NVFP4: to the nearest value, ties to the even code, saturating.

    Args:
        x: [..., N] of any float dtype, N a multiple of 16.
        global_scale: float32, broadcast against x.
        choice: how block scales are found.

    Returns:
        (packed [..., N / 2] uint8, scales [..., N / 16] float8_e4m3fn). A block whose scale
        rounds to zero has codes of zero.
    """
    scaled = x.to(torch.float32) / global_scale
    # [16, B]: what runs over the blocks then runs over contiguous memory.
    blocks = scaled.reshape(-1, GROUP_SIZE).t().contiguous()
    magnitudes = blocks.abs()
    scales = magnitudes.amax(dim=0).div_(E2M1_MAX).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    if choice == "mse":
        scales = _least_error(magnitudes, scales)
    wide = scales.to(torch.float32)
    codes = _nearest_codes(torch.where(wide > 0, magnitudes / wide, 0.0))
    codes |= torch.signbit(blocks).to(torch.uint8) << 3
    *rows, width = x.shape
    packed = pack_codes(codes.t()).reshape(*rows, width // 2)
    return packed, scales.view(*rows, width // GROUP_SIZE)


def global_scale(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """The float32 scale that maps the largest magnitude of x over `dim` to the format's largest.

    Kept as size-1 dimensions; where all of x is zero, the scale is 1. NaN stays NaN.
    """
    dims = tuple(range(x.ndim)) if dim is None else dim
    peak = x.abs().amax(dim=dims, keepdim=True).to(torch.float32)
    return torch.where(peak == 0, 1.0, peak / LARGEST)


def _nearest(x: Tensor) -> Tensor:
    """Float32 from 0 to 6 -> the nearest e2m1 magnitude, in place; ties go to the even code."""
    # The power of two at or below x, at least 1; half of it is the distance between neighbours.
    binade = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=1.0)
    # Adding so much leaves no bits for anything finer than that distance.
    large = binade.mul_(_ROUNDER / 2)
    return x.add_(large).sub_(large)


def _nearest_codes(x: Tensor) -> Tensor:
    """Non-negative float32 -> the code of the nearest e2m1 magnitude, uint8."""
    doubled = (_nearest(x.clamp(max=E2M1_MAX)) * 2).to(torch.int32)  # 0, 1, 2, 3, 4, 6, 8, 12
    table = torch.zeros(13, dtype=torch.uint8, device=x.device)
    for code, magnitude in enumerate(E2M1_MAGNITUDES):
        table[int(2 * magnitude)] = code
    return table.index_select(0, doubled.flatten()).view(x.shape)


def _least_error(magnitudes: Tensor, scales: Tensor) -> Tensor:
    """The scales near `scales` under which each block comes out closest.

    Args:
        magnitudes: [16, B] float32.
        scales: [B] float8_e4m3fn.

    Returns:
        [B] float8_e4m3fn, none of them zero.
    """
    values = e4m3_values(device=magnitudes.device)
    start = scales.view(torch.uint8).to(torch.int32)
    best = torch.zeros_like(start)
    best_error = torch.full_like(magnitudes[0], torch.inf)
    for step in _MSE_STEPS:
        codes = (start + step).clamp_(1, _LARGEST_E4M3_CODE)
        scale = values.index_select(0, codes)
        scaled = magnitudes * scale.reciprocal()
        rounded = _nearest(scaled.clamp(max=E2M1_MAX))
        error = rounded.sub_(scaled).square_().sum(dim=0).mul_(scale).mul_(scale)
        best = torch.where(error < best_error, codes, best)
        best_error = torch.minimum(error, best_error)
    return best.to(torch.uint8).view(torch.float8_e4m3fn)
