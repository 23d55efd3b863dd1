"""Router logits to float32's precision from a bfloat16 input, on tensor cores.

    z[t, e] = sum_d x[t, d] * w[e, d]          x bfloat16, w float32

A float32 number is the sum of three bfloat16 numbers (3 x 8 bits of mantissa), so three bfloat16
products give exactly the terms that a float32 product has, at a multiple of its speed:

    w1 = b16(w),  w2 = b16(w - w1),  w3 = w - w1 - w2,      z = x.w3 + x.w2 + x.w1

The weight stays in float32 and is taken apart on its way to the tensor cores. For few tokens the
sum over d is cut into parts, computed side by side; whoever reads the logits adds them up, in a
fixed order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.triton_import import (
    dot_in_float32,
    launch_early,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

_BLOCK_E = 64


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, E] in weight's dtype, float32. x: [T, D]; weight: [E, D]."""
    return F.linear(x.to(weight.dtype), weight)


@triton.jit(do_not_specialize=["num_tokens"])
def _router_gemm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_experts,
    width,
    x_stride,
    part_width,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """A tile of experts (axis 0) by tokens (axis 1), over one part of the sum (axis 2)."""
    wait_for_inputs()
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    first = part * part_width
    total = tl.zeros((BLOCK_E, BLOCK_T), tl.float32)
    for start in range(first, tl.minimum(first + part_width, width), BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        weight = tl.load(
            weight_ptr + expert[:, None].to(tl.int64) * width + d[None, :],
            (expert < num_experts)[:, None] & (d < width)[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + token[None, :].to(tl.int64) * x_stride + d[:, None],
            (token < num_tokens)[None, :] & (d < width)[:, None],
            other=0.0,
        )
        high = round_to(weight, tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = round_to(rest, tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        if IN_FLOAT32:
            high, middle, low = high.to(tl.float32), middle.to(tl.float32), low.to(tl.float32)
            x = x.to(tl.float32)
        # A sum of its own for each piece: the tensor cores' long sums are less exact than float32.
        piece = tl.dot(low, x, input_precision="ieee")
        piece = tl.dot(middle, x, piece, input_precision="ieee")
        piece = tl.dot(high, x, piece, input_precision="ieee")
        total += piece
    place = (part * num_tokens + token).to(tl.int64)[None, :] * num_experts + expert[:, None]
    inside = (expert < num_experts)[:, None] & (token < num_tokens)[None, :]
    tl.store(out_ptr + place, total, inside)


def router_gemm_triton(x: Tensor, weight: Tensor) -> Tensor:
    """Parts [S, T, E] whose sum over S is `router_gemm`; x [T, D] in bfloat16."""
    num_tokens, width = x.shape
    num_experts = weight.shape[0]
    block_t, parts, block_d = _tiling(num_tokens, width)
    part_width = -(-width // (parts * block_d)) * block_d
    parts = -(-width // part_width)
    out = torch.empty((parts, num_tokens, num_experts), dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    grid = (-(-num_experts // _BLOCK_E), -(-num_tokens // block_t), parts)
    _router_gemm_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        num_experts,
        width,
        x.stride(0),
        part_width,
        BLOCK_T=block_t,
        BLOCK_E=_BLOCK_E,
        BLOCK_D=block_d,
        IN_FLOAT32=dot_in_float32(x.dtype),
        num_warps=4,
        num_stages=3,
        **launch_early(x.device, num_tokens),
    )
    return out


def _tiling(num_tokens: int, width: int) -> tuple[int, int, int]:
    """(tokens of a tile, parts of the sum, width of a piece), so that every core has work."""
    block_t = next(size for size in (16, 32, 64, 128) if num_tokens <= size or size == 128)
    tiles = max(1, -(-num_tokens // block_t))
    parts = max(1, min(32, 128 // tiles, width // 256))
    return block_t, parts, 64
