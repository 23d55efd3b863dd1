"""The two coefficients of a gated residual connection.

    u = gate / temperature
    beta  = sigmoid(u)                                    weight of the branch
    alpha = sqrt(max(1e-3, sigmoid(-u) * (1 + beta)))     weight of the stream

sigmoid(-u) * (1 + beta) is 1 - beta^2 without cancellation, so that for a stream and a branch of
unit mean square, uncorrelated, the blend has unit mean square too.
"""

import torch
from torch import Tensor

# In no config file; fixed by the released model's implementation.
MIN_ALPHA_SQUARED = 1e-3


def residual_gate(gate: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(alpha, beta), each [D] in the dtype of `gate` (float32), from the learned `gate` [D]."""
    u = gate / temperature
    beta = torch.sigmoid(u)
    alpha = torch.sqrt(torch.clamp(torch.sigmoid(-u) * (1 + beta), min=MIN_ALPHA_SQUARED))
    return alpha, beta
