"""SwiGLU's activation: silu(gate) * up, in float32 with one rounding."""

import torch.nn.functional as F
from torch import Tensor

from musespark.ops.precision import wide_dtype


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2I] (gate first, then up) -> [..., I], same dtype."""
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)
