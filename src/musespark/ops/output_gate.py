"""Attention output: norm of each head, times the sigmoid of its gate.

o = b(rms(o, eps) * sigmoid(gate))       float32 inside, one rounding
"""

import torch
from torch import Tensor

from musespark.ops.precision import wide_dtype
from musespark.ops.rms_norm import rms_norm, rms_norm_reference


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
