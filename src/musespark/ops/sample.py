"""Choosing tokens from logits, by one uniform number per row.

    token = first i with  p_0 + ... + p_i  >  u * sum(p),   p = softmax(z)

z are logits after temperature and filters (sample_filter). One number decides, so a token is a
function of its logits and that number alone; what a row gets does not depend on the others.
"""

import torch
from torch import Tensor


def sample_from_uniform(logits: Tensor, uniform: Tensor) -> Tensor:
    """The token [N] at which each row's cumulative distribution passes `uniform`.

    Args:
        logits: [N, V] float32; -inf: never.
        uniform: [N] float64, from 0 to below 1.
    """
    return sample_from_weights(logits.softmax(dim=-1), uniform)


def sample_from_weights(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token [N] at which each row's sum of `weights` [N, V], not negative and not all zero,
    passes the share `uniform` [N] float64 of its total."""
    # In float64: over 200,000 tokens, sums in float32 would be off by more than some tokens weigh.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    chosen = torch.searchsorted(cumulative, total * uniform[:, None], right=True)
    # Rounding may put the product at the total itself, behind the last token that is possible.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(chosen, last)[:, 0]
