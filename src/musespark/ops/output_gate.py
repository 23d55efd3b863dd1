"""Attention output: norm of each head, times the sigmoid of its gate.

o = b(rms(o, eps) * sigmoid(gate))       float32 inside, one rounding
"""

import torch
from torch import Tensor

from musespark.ops.precision import wide_dtype
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
_HEADS = 32


def output_gate_reference(attention_output: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The formula above. Arguments as for `output_gate`."""
    wide = wide_dtype(attention_output.dtype)
    normed = rms_norm_reference(attention_output, None, eps, out_dtype=wide)
    return (normed * torch.sigmoid(gate.to(wide))).to(attention_output.dtype)


def output_gate(attention_output: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Norm and gate the heads' outputs.

    Args:
        attention_output: [T, heads, head_dim].
        gate: [T, heads, head_dim], the gate projection's output.
        eps: of the norm.

    Returns:
        [T, heads, head_dim] in attention_output's dtype.
    """
    wide = wide_dtype(attention_output.dtype)
    normed = rms_norm(attention_output, None, eps, out_dtype=wide)
    return normed.mul_(torch.sigmoid(gate.to(wide))).to(attention_output.dtype)


@triton.jit
def norm_and_gate(x, gate, eps):
    """The formula above, of heads x [N, head_dim] in float32, not rounded."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)[:, None]
    return normed * tl.sigmoid(gate.to(tl.float32))


@triton.jit
def _output_gate_kernel(
    attention_ptr,
    gate_ptr,
    out_ptr,
    num_heads,
    attention_stride,
    gate_stride,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One token (axis 0) and a block of its heads (axis 1) per program."""
    wait_for_inputs()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    place = head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    inside = place < num_heads * HEAD_DIM
    x = tl.load(attention_ptr + token * attention_stride + place, inside, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + place, inside, other=0.0)
    out = round_to(norm_and_gate(x.to(tl.float32), gate, eps), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * num_heads * HEAD_DIM + place, out, inside)


def output_gate_triton(
    attention_output: Tensor, gate: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """`output_gate` as one kernel; head_dim must be a power of two; `out` may be the input."""
    num_tokens, num_heads, head_dim = attention_output.shape
    if out is None:
        out = attention_output.new_empty(attention_output.shape)
    if not num_tokens:
        return out
    assert head_dim == next_power_of_2(head_dim)
    assert attention_output.stride()[1:] == gate.stride()[1:] == (head_dim, 1)
    _output_gate_kernel[(num_tokens, -(-num_heads // _HEADS))](
        attention_output,
        gate,
        out,
        num_heads,
        attention_output.stride(0),
        gate.stride(0),
        eps,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=_HEADS,
        num_warps=4,
        **launch_early(out.device, num_tokens),
    )
    return out
