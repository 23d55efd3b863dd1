"""Final logits: scaled, then softly capped.

logits = cap * tanh(multiplier * x / cap)       in float32
"""

import torch
from torch import Tensor


def soft_cap(x: Tensor, multiplier: float, cap: float) -> Tensor:
    """Logits within (-cap, cap).

    Args:
        x: [N, V] float32, the vocabulary projection's output; overwritten.
        multiplier: output multiplier of the config.
        cap: soft cap of the config.
    """
    return torch.tanh(x.mul_(multiplier / cap), out=x).mul_(cap)
