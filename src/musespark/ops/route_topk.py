"""Choice of experts and their weights.

    p   = sigmoid(z)  (or softmax(z))
    ids = top K of (p + bias), in descending order, equal scores: the lowest expert id first
    w   = p[ids] / (sum(p[ids]) + 1e-15) * scale

The bias selects and never weights. A padding row gets id -1 and weight 0: it touches no expert.
"""

import torch
from torch import Tensor

# In no config file; fixed by the released model's implementation.
DIVISION_EPS = 1e-15


def route_topk(
    router_logits: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    *,
    scoring: str = "sigmoid",
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select `top_k` experts per token.

    Args:
        router_logits: [T, E] float32.
        bias: [E] float32, added to the scores for the selection only.
        top_k: experts per token, at most E.
        scale: the routed scaling factor.
        scoring: "sigmoid" or "softmax".
        padding: [T] bool, True for rows that are no tokens; None: none are.

    Returns:
        (weights [T, K] float32, ids [T, K] int64), in descending order of the biased score.
    """
    scores = torch.sigmoid(router_logits) if scoring == "sigmoid" else router_logits.softmax(-1)
    # A stable sort keeps equal scores in order of their ids; topk promises no order among them.
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + DIVISION_EPS)
    if scale != 1.0:
        weights = weights * scale
    if padding is not None:
        ids = ids.masked_fill(padding[:, None], -1)
        weights = weights.masked_fill(padding[:, None], 0.0)
    return weights, ids
