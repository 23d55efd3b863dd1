"""y = x @ weight.T for a few tokens: reads each weight once, at the speed of memory.

A matrix library's kernels are made for many rows, and add up parts in a second launch. Here a
program owns a strip of weight rows and all of their columns, and all strips are read at once: a
second round would leave most multiprocessors idle. Operands are swapped: weights are the matrix
unit's left operand, tokens the narrow right one.
"""

import torch
from torch import Tensor

from musespark.ops.triton_import import (
    HAS_TRITON,
    dot_in_float32,
    is_hopper,
    launch_early,
    next_power_of_2,
    num_multiprocessors,
    round_to,
    tl,
    triton,
    wait_for_inputs,
)

MAX_TOKENS = 16
"""With more, the matrix library is as fast or faster."""
# Columns of a step: on an H200 no other number was faster, nor were more steps in flight.
_DEPTH, _MAX_STAGES = 128, 8
# Of a multiprocessor's shared memory, for steps in flight.
_FETCHED_BYTES = 208 * 1024
# Weight rows of a strip. Fewer make small matrix instructions, which are slow; more were not faster
# than the matrix library.
_MIN_ROWS, _MAX_ROWS = 64, 144
# Smaller weights are a matter of launches, not of memory.
_MIN_ELEMENTS = 2**23


def takes(weight: Tensor) -> bool:
    """Whether products with `weight` [N, K] are faster this way, for up to MAX_TOKENS tokens."""
    if not HAS_TRITON or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    num_rows, width = weight.shape
    fits = width % _DEPTH == 0 and weight.numel() >= _MIN_ELEMENTS
    fits = fits and sum(_strip(num_rows, num_multiprocessors(weight.device))) <= _MAX_ROWS
    return fits and is_hopper(weight.device)


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
    MORE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
):
    """ROWS + MORE_ROWS rows of the weight by all tokens, each number a power of two."""
    first_row = tl.program_id(0) * (ROWS + MORE_ROWS)
    token = tl.arange(0, BLOCK_T)
    column = tl.arange(0, DEPTH)
    # Rows behind the last are read as the last one, and not stored.
    row = first_row + tl.arange(0, ROWS)
    weights = weight_ptr + tl.minimum(row, num_rows - 1).to(tl.int64) * WIDTH
    weights = weights[:, None] + column[None, :]
    acc = tl.zeros((ROWS, BLOCK_T), tl.float32)
    if MORE_ROWS > 0:
        more_row = first_row + ROWS + tl.arange(0, MORE_ROWS)
        more_weights = weight_ptr + tl.minimum(more_row, num_rows - 1).to(tl.int64) * WIDTH
        more_weights = more_weights[:, None] + column[None, :]
        more_acc = tl.zeros((MORE_ROWS, BLOCK_T), tl.float32)
    tokens = x_ptr + token[None, :].to(tl.int64) * x_stride + column[:, None]
    exists = (token < num_tokens)[None, :] & (column >= 0)[:, None]
    wait_for_inputs()
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        weight = tl.load(weights + start, eviction_policy="evict_first")
        x = tl.load(tokens + start, exists, other=0.0)
        if IN_FLOAT32:
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(weight, x, acc)
        if MORE_ROWS > 0:
            more = tl.load(more_weights + start, eviction_policy="evict_first")
            if IN_FLOAT32:
                more = more.to(tl.float32)
            more_acc = tl.dot(more, x, more_acc)
    _store(acc, out_ptr, row, token, num_rows, num_tokens)
    if MORE_ROWS > 0:
        _store(more_acc, out_ptr, more_row, token, num_rows, num_tokens)


@triton.jit
def _store(acc, out_ptr, row, token, num_rows, num_tokens):
    """Round the sums [rows, tokens], and store them transposed."""
    place = token[None, :].to(tl.int64) * num_rows + row[:, None]
    inside = (token < num_tokens)[None, :] & (row < num_rows)[:, None]
    tl.store(out_ptr + place, round_to(acc, out_ptr.dtype.element_ty), inside)


def _strip(num_rows: int, multiprocessors: int) -> tuple[int, int]:
    """Rows of a program, in two parts that are powers of two, so that all programs run at once."""
    share = max(_MIN_ROWS, -(-num_rows // (16 * multiprocessors)) * 16)
    rows = next_power_of_2(share + 1) // 2
    return rows, next_power_of_2(share - rows) if share > rows else 0


def skinny_linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` of x [T, K] bfloat16 and weight [N, K]: [T, N], up to 16 tokens.

    K must be a multiple of 128.
    """
    num_tokens, width = x.shape
    num_rows = weight.shape[0]
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    assert num_tokens <= MAX_TOKENS
    assert width % _DEPTH == 0
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    rows, more_rows = _strip(num_rows, num_multiprocessors(x.device))
    step_bytes = (rows + more_rows + MAX_TOKENS) * _DEPTH * weight.element_size()
    _skinny_kernel[(-(-num_rows // (rows + more_rows)),)](
        x,
        weight,
        out,
        num_tokens,
        num_rows,
        x.stride(0),
        WIDTH=width,
        BLOCK_T=MAX_TOKENS,
        ROWS=rows,
        MORE_ROWS=more_rows,
        DEPTH=_DEPTH,
        STAGES=min(_MAX_STAGES, _FETCHED_BYTES // step_bytes),
        IN_FLOAT32=dot_in_float32(x.dtype),
        num_warps=4,
        **launch_early(x.device, num_tokens),
    )
    return out
