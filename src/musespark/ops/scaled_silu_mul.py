"""SwiGLU's activation on products that still lack the weights' global scales.

    out = silu(gate_scale * gate) * (up_scale * up)

Both scales differ from row to row, and one another: silu sees the scaled gate. Everything is
computed in float32 and rounded once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops.precision import wide_dtype


def scaled_silu_mul(
    gate_up: Tensor, gate_scale: Tensor, up_scale: Tensor, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Scale, activate, multiply.

    Args:
        gate_up: [R, 2I], gate first, then up.
        gate_scale: [R] float32.
        up_scale: [R] float32.
        out_dtype: of the result; gate_up's own if None.

    Returns:
        [R, I].
    """
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    gate = F.silu(gate * gate_scale[:, None])
    return gate.mul_(up * up_scale[:, None]).to(out_dtype or gate_up.dtype)
