"""Router logits to float32's precision from a bfloat16 input, on tensor cores.

    z[t, e] = sum_d x[t, d] * w[e, d]          x bfloat16, w float32

A float32 number is the sum of three bfloat16 numbers (3 x 8 bits of mantissa), so three bfloat16
products give exactly the terms that a float32 product has, at a multiple of its speed:

    w1 = b16(w),  w2 = b16(w - w1),  w3 = w - w1 - w2,      z = x.w3 + x.w2 + x.w1

For few tokens the weight is read in float32 and taken apart on its way to the tensor cores: fewer
bytes. For many, that would take longer than the products, so they read it as three planes, split
once by `split_weight`. The sum over d is cut into parts, computed side by side; whoever reads the
logits adds them up, in a fixed order.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.triton_import import (
    dot_in_float32,
    launch_early,
    next_power_of_2,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

# Up to so many, splitting the weight on the way takes no longer than reading three planes of it.
_FEW_TOKENS = 64
_BLOCK_E, _BLOCK_D = 64, 64


def router_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, E] in weight's dtype, float32. x: [T, D]; weight: [E, D]."""
    return F.linear(x.to(weight.dtype), weight)


def split_weight(weight: Tensor) -> Tensor:
    """[3, E, D] bfloat16 that add up to weight [E, D] float32, largest first."""
    high = weight.to(torch.bfloat16)
    rest = weight - high.to(torch.float32)
    middle = rest.to(torch.bfloat16)
    low = rest - middle.to(torch.float32)
    return torch.stack((high, middle, low.to(torch.bfloat16)))


@triton.jit
def _dot(left, right, total, IN_FLOAT32: tl.constexpr):
    if IN_FLOAT32:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


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
        # A sum of its own for each piece: the tensor cores' long sums are less exact than float32.
        piece = _dot(low, x, tl.zeros((BLOCK_E, BLOCK_T), tl.float32), IN_FLOAT32)
        piece = _dot(middle, x, piece, IN_FLOAT32)
        piece = _dot(high, x, piece, IN_FLOAT32)
        total += piece
    place = (part * num_tokens + token).to(tl.int64)[None, :] * num_experts + expert[:, None]
    inside = (expert < num_experts)[:, None] & (token < num_tokens)[None, :]
    tl.store(out_ptr + place, total, inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _router_planes_kernel(
    x_ptr,
    planes_ptr,
    out_ptr,
    num_tokens,
    num_experts,
    width,
    x_stride,
    part_width,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """As above, with the weight in planes [3, E, D]; BLOCK experts by BLOCK tokens."""
    wait_for_inputs()
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(2)
    first = part * part_width
    d = tl.arange(0, BLOCK_D)
    is_expert, is_token = expert < num_experts, token < num_tokens
    plane = tl.cast(num_experts, tl.int64) * width
    weight = planes_ptr + expert[:, None].to(tl.int64) * width + d[None, :]
    x = x_ptr + token[:, None].to(tl.int64) * x_stride + d[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    stop = tl.minimum(first + part_width, width)
    for start in tl.range(first, stop, BLOCK_D, num_stages=STAGES):
        inside = (d < width - start)[None, :]
        mask = is_expert[:, None] & inside
        low = tl.load(weight + 2 * plane + start, mask, other=0.0)
        middle = tl.load(weight + plane + start, mask, other=0.0)
        high = tl.load(weight + start, mask, other=0.0)
        rows = tl.load(x + start, is_token[:, None] & inside, other=0.0)
        piece = _dot(rows, low.T, tl.zeros((BLOCK, BLOCK), tl.float32), IN_FLOAT32)
        piece = _dot(rows, middle.T, piece, IN_FLOAT32)
        piece = _dot(rows, high.T, piece, IN_FLOAT32)
        total += piece
    place = (part * num_tokens + token).to(tl.int64)[:, None] * num_experts + expert[None, :]
    tl.store(out_ptr + place, total, is_token[:, None] & is_expert[None, :])


def router_gemm_triton(x: Tensor, weight: Tensor, planes: Tensor | None = None) -> Tensor:
    """Parts [S, T, E] whose sum over S is `router_gemm`.

    Args:
        x: [T, D] bfloat16.
        weight: [E, D] float32.
        planes: `split_weight` of it, for more than a few tokens; None: split here.
    """
    num_tokens, num_experts = x.shape[0], weight.shape[0]
    if not num_tokens:
        return x.new_empty((1, 0, num_experts), dtype=torch.float32)
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    if num_tokens <= _FEW_TOKENS:
        return _multiply_few(x, weight)
    return _multiply_many(x, split_weight(weight) if planes is None else planes)


def _multiply_few(x: Tensor, weight: Tensor) -> Tensor:
    num_tokens, width = x.shape
    num_experts = weight.shape[0]
    block_t = max(16, next_power_of_2(num_tokens))
    parts, part_width = _cut(width, 32)
    out = x.new_empty((parts, num_tokens, num_experts), dtype=torch.float32)
    _router_gemm_kernel[(-(-num_experts // _BLOCK_E), -(-num_tokens // block_t), parts)](
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
        BLOCK_D=_BLOCK_D,
        IN_FLOAT32=dot_in_float32(x.dtype),
        num_warps=4,
        num_stages=3,
        **launch_early(x.device, num_tokens),
    )
    return out


def _multiply_many(x: Tensor, planes: Tensor) -> Tensor:
    num_tokens, width = x.shape
    num_experts = planes.shape[1]
    # One large tile fills a multiprocessor, or two small ones.
    block, programs = (64, 256) if num_tokens <= 512 else (128, 128)
    tiles = (-(-num_experts // block), -(-num_tokens // block))
    parts, part_width = _cut(width, programs // (tiles[0] * tiles[1]))
    out = x.new_empty((parts, num_tokens, num_experts), dtype=torch.float32)
    _router_planes_kernel[(*tiles, parts)](
        x,
        planes,
        out,
        num_tokens,
        num_experts,
        width,
        x.stride(0),
        part_width,
        BLOCK=block,
        BLOCK_D=_BLOCK_D,
        STAGES=3,
        IN_FLOAT32=dot_in_float32(x.dtype),
        num_warps=block // 16,
        **launch_early(x.device, num_tokens),
    )
    return out


def _cut(width: int, wanted: int) -> tuple[int, int]:
    """(parts of the sum, width of one), about so many, and none too short to be worth a program."""
    parts = max(1, min(wanted, 32, width // 256))
    part_width = -(-width // (parts * _BLOCK_D)) * _BLOCK_D
    return -(-width // part_width), part_width
