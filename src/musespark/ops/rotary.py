"""Rotary angles: cosine and sine of position times frequency, for the tokens of one step.

    inv_freq_i = theta^(-2i / head_dim),  angle = position * inv_freq,  all in float32

Only the angles of the step's own tokens are formed: a table for a million positions would take
256 MiB and be read once.
"""

import torch
from torch import Tensor


def rotary_angles(
    positions: Tensor, theta: float, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, head_dim / 2].

    Args:
        positions: [T] integer positions in the sequence.
        theta: base of the frequencies, greater than 0.
        head_dim: width of a head.
        dtype: float32, or float64 for a model that runs in float64.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=positions.device) / head_dim
    inv_freq = theta ** (-exponent)
    angles = positions.to(dtype)[:, None] * inv_freq  # [T, head_dim / 2]
    return angles.cos(), angles.sin()
