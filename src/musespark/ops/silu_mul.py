"""SwiGLU's activation: silu(gate) * up, in float32 with one rounding."""

import torch.nn.functional as F
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.triton_import import round_to, tl, triton

_BLOCK = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2I] (gate first, then up) -> [..., I], same dtype."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, width, row_stride, BLOCK: tl.constexpr):
    """A run of columns (axis 1) of one row (axis 0) per program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate_ptr = gate_up_ptr + row * row_stride + column
    gate = tl.load(gate_ptr, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + column, round_to(out, out_ptr.dtype.element_ty), inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """`silu_mul` as one kernel; gate_up [R, 2I] with contiguous rows."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, width))
    if out.numel():
        assert gate_up.stride(1) == 1
        grid = (num_rows, -(-width // _BLOCK))
        _silu_mul_kernel[grid](gate_up, out, width, gate_up.stride(0), BLOCK=_BLOCK, num_warps=4)
    return out
