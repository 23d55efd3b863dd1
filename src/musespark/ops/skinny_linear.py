"""y = x @ weight.T for a few tokens: reads each weight once, at the speed of memory.

A matrix library's kernels are made for many rows, and add up parts in a second launch. Here a
program owns a strip of weight rows and all of their columns. Operands are swapped: weights are the
matrix unit's left operand, tokens the narrow right one.
"""

import torch
from torch import Tensor

from musespark.ops.triton_import import (
    HAS_TRITON,
    dot_in_float32,
    launch_early,
    num_multiprocessors,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

MAX_TOKENS = 16
"""With more, the matrix library is as fast or faster."""
# Weight rows of a program, columns of a step, steps in flight: on an H200, of 16 to 128 rows, 64 to
# 512 columns and 3 to 8 steps, 64 rows and 128 columns with 6 to 8 steps were the fastest.
_ROWS, _DEPTH, _STAGES = 64, 128, 6
# Columns fetched while the inputs are still being computed.
_AHEAD = 512
# Smaller weights are a matter of launches, not of memory.
_MIN_ELEMENTS = 2**23


def takes(weight: Tensor) -> bool:
    """Whether products with `weight` [N, K] are faster this way, for up to MAX_TOKENS tokens."""
    if not HAS_TRITON or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    num_rows, width = weight.shape
    fits = width % _DEPTH == 0 and width > _AHEAD and weight.numel() >= _MIN_ELEMENTS
    # A strip fills a multiprocessor. Strips of a second round would fetch nothing ahead.
    fits = fits and num_rows <= _ROWS * num_multiprocessors(weight.device)
    return fits and torch.cuda.get_device_capability(weight.device) == (9, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    x_stride,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """ROWS rows of the weight by all tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, BLOCK_T)
    column = tl.arange(0, DEPTH)
    # Rows behind the last are read as the last one, and not stored.
    weight_row = tl.minimum(row, num_rows - 1).to(tl.int64) * WIDTH
    weights = weight_ptr + weight_row[:, None] + column[None, :]
    tokens = x_ptr + token[None, :].to(tl.int64) * x_stride + column[:, None]
    exists = (token < num_tokens)[None, :] & (column >= 0)[:, None]
    # The last columns' weights are fetched before the inputs are there, and multiplied at the end.
    REST: tl.constexpr = WIDTH - AHEAD
    last = REST + tl.arange(0, AHEAD)
    last_weight = tl.load(
        weight_ptr + weight_row[:, None] + last[None, :], eviction_policy="evict_first"
    )
    wait_for_inputs()
    acc = tl.zeros((ROWS, BLOCK_T), tl.float32)
    for start in tl.range(0, REST, DEPTH, num_stages=STAGES):
        weight = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(tokens + start, exists, other=0.0)
        if IN_FLOAT32:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, x, acc)
    last_x = tl.load(
        x_ptr + token[None, :].to(tl.int64) * x_stride + last[:, None],
        (token < num_tokens)[None, :] & (last >= 0)[:, None],
        other=0.0,
    )
    if IN_FLOAT32:
        last_weight, last_x = last_weight.to(tl.float32), last_x.to(tl.float32)
    acc = tl.dot(last_weight, last_x, acc)
    place = token[None, :].to(tl.int64) * num_rows + row[:, None]
    inside = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    tl.store(out_ptr + place, round_to(acc, out_ptr.dtype.element_ty), inside)


def skinny_linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` of x [T, K] bfloat16 and weight [N, K]: [T, N], up to 16 tokens.

    K must be a multiple of 128 above 512.
    """
    num_tokens, width = x.shape
    num_rows = weight.shape[0]
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    assert num_tokens <= MAX_TOKENS
    assert width % _DEPTH == 0
    assert width > _AHEAD
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    _skinny_kernel[(-(-num_rows // _ROWS),)](
        x,
        weight,
        out,
        num_tokens,
        num_rows,
        x.stride(0),
        WIDTH=width,
        BLOCK_T=MAX_TOKENS,
        ROWS=_ROWS,
        DEPTH=_DEPTH,
        AHEAD=_AHEAD,
        STAGES=_STAGES,
        IN_FLOAT32=dot_in_float32(x.dtype),
        num_warps=4,
        **launch_early(x.device, num_tokens),
    )
    return out
