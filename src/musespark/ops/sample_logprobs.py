"""Log-probabilities of chosen tokens, their ranks, and the most likely tokens beside them."""

from typing import NamedTuple

from torch import Tensor


class RankedLogprobs(NamedTuple):
    """For N positions."""

    logprobs: Tensor
    """[N] of the chosen tokens."""
    ranks: Tensor
    """[N] int64 of the chosen tokens, 1 for the most likely."""
    top_ids: Tensor
    """[N, K] int64 most likely tokens, in descending order."""
    top_logprobs: Tensor
    """[N, K]."""


def ranked_logprobs(logits: Tensor, token_ids: Tensor, top: int) -> RankedLogprobs:
    """Of the distribution that `logits` [N, V] spell, for `token_ids` [N] and the `top` best."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])  # [N, 1]
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    return RankedLogprobs(chosen[:, 0], ranks, ids, values)
