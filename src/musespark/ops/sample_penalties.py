"""Making tokens less likely that a sequence already holds.

z = z / r if z > 0 else z * r         where the prompt or the output holds the token
z = z - frequency * count - presence * (count > 0),   count: how often the output holds it
"""

import torch
from torch import Tensor


def penalize(
    logits: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """Logits [N, V] after the three penalties above.

    Args:
        logits: [N, V] float32.
        output_counts: [N, V] int32, how often each row's output holds each token.
        in_prompt: [N, V] bool, which tokens its prompt holds.
        presence, frequency, repetition: [N] float32; 0, 0 and 1 change nothing.
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * output_counts - presence[:, None] * in_output
