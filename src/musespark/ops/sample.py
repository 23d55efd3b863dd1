"""Choosing tokens from logits, each row with settings of its own.

    z     = logits / temperature, -inf where top_k, top_p or min_p cut
    token = first i with  p_0 + ... + p_i  >  u * sum(p),   p = softmax(z)

One uniform number per row decides, so a token is a function of its logits and that number alone.
Every step treats rows apart: what a row gets does not depend on the others.
"""

import torch
from torch import Tensor

# How many of the most likely tokens are ranked: more only for rows that have not reached their
# top_p within the first. A whole row takes some hundred times as long to sort.
_NUM_RANKED = (64, 1024)


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Cut unlikely tokens away; those exactly as likely as the last one kept are kept too.

    Args:
        logits: [N, V] float32, after temperature.
        top_k: [N] int64, 0: all.
        top_p: [N] float32, 1: all. Of the distribution after top_k.
        min_p: [N] float32, 0: all. Relative to the most likely token.

    Returns:
        [N, V]; -inf for what is cut away.
    """
    threshold = logits.max(dim=-1).values + min_p.log()  # -inf where min_p is 0
    if bool((top_k > 0).any()) or bool((top_p < 1).any()):
        threshold = torch.maximum(threshold, _rank_threshold(logits, top_k, top_p))
    return torch.where(logits < threshold[:, None], -torch.inf, logits)


def filter_logits_roughly(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """As `filter_logits`, asking the device nothing: rows whose cut lies beyond the first 1024
    tokens are left whole. For distributions that need not be exact, only known."""
    count = min(_NUM_RANKED[-1], logits.shape[1])
    limit = torch.where(top_k > 0, top_k, logits.shape[1])
    ranked = logits.topk(count, dim=-1).values
    total = logits.logsumexp(dim=-1)
    last, num_kept = _nucleus(ranked, total, limit, top_p.masked_fill(top_p >= 1, torch.inf))
    is_cut = (limit <= count) | (num_kept < count)
    threshold = torch.where(is_cut, last, -torch.inf)
    threshold = torch.maximum(threshold, logits.max(dim=-1).values + min_p.log())
    return torch.where(logits < threshold[:, None], -torch.inf, logits)


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


def _rank_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[N] the smallest logit that top_k and top_p let pass; -inf where neither cuts."""
    vocab_size = logits.shape[1]
    limit = torch.where(top_k > 0, top_k, vocab_size).clamp_max_(vocab_size)
    has_limit = limit < vocab_size
    # Rounded sums may reach 1 before the last token.
    top_p = top_p.masked_fill(top_p >= 1, torch.inf)
    threshold = torch.full_like(top_p, -torch.inf)
    total = logits.logsumexp(dim=-1)
    pending = (has_limit | (top_p < torch.inf)).nonzero()[:, 0]
    for count in (*(count for count in _NUM_RANKED if count < vocab_size), vocab_size):
        # Sums of a row with top_k can only be told once all those tokens are ranked.
        fits = (limit <= count) | ~has_limit
        rows = pending[fits[pending]]
        if not len(rows):
            continue
        ranked = logits[rows].topk(count, dim=-1).values  # [n, count], descending
        threshold[rows], num_kept = _nucleus(ranked, total[rows], limit[rows], top_p[rows])
        settled = (limit[rows] <= count) | (num_kept < count)
        pending = torch.cat((pending[~fits[pending]], rows[~settled]))
    return threshold


def _nucleus(ranked: Tensor, total: Tensor, limit: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """(smallest logit kept [N], how many are kept [N]) of `ranked` [N, C], in descending order.

    `total` [N] is the logarithm of what all tokens of a row weigh; where `limit` cuts within C,
    probabilities are relative to what it leaves.
    """
    within = torch.arange(ranked.shape[1], device=ranked.device) < limit[:, None]
    cut = ranked.masked_fill(~within, -torch.inf)
    total = torch.where(limit <= ranked.shape[1], cut.logsumexp(dim=-1), total)
    probabilities = (cut - total[:, None]).exp()
    # A token stays while those more likely than it have not reached top_p yet.
    kept = within & (probabilities.cumsum(dim=-1) - probabilities < top_p[:, None])
    num_kept = kept.sum(dim=-1).clamp_min_(1)
    return ranked.gather(1, num_kept[:, None] - 1)[:, 0], num_kept
