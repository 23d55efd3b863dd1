"""Cutting unlikely tokens away: top_k, top_p (the nucleus) and min_p, each row with its own.

    threshold = max( the top_k-th largest logit,
                     the largest t with  sum of p over logits >= t  >=  top_p,
                     max + log(min_p) )

p is the softmax of the row, after top_k. What is below the threshold becomes -inf. Every row is
treated apart from the others.
"""

import torch
from torch import Tensor

from musespark.ops.triton_import import tl, triton

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


# Logits of a row that are read at once, and thresholds that are tried in one reading.
_BLOCK, _TRIES = 2048, 8
# Sums of exponentials this far below the largest are zero in float32.
_FARTHEST = 104.0


@triton.jit
def _ordered(x):
    """Integers in the order of float32 numbers, and back again."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _amounts(
    row_ptr, size, thresholds, top, lowest, COUNTS: tl.constexpr, TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[TRIES] float64: how many logits reach each threshold, or what those from `lowest` weigh."""
    # Each column adds up few numbers in float32; columns in float64, once.
    amounts = tl.zeros((TRIES, BLOCK), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + place, place < size, other=-float("inf"))
        weight = tl.where(place < size, 1.0, 0.0)
        if not COUNTS:
            weight = tl.where(x >= lowest, tl.exp(x - top), 0.0)
        reaches = x[None, :] >= thresholds[:, None]
        amounts += tl.where(reaches, weight[None, :], 0.0)
    return tl.sum(amounts.to(tl.float64), axis=1)


@triton.jit
def _largest_reaching(
    row_ptr, size, wanted, top, lowest, COUNTS: tl.constexpr, TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest logit such that all from it on amount to `wanted` or more."""
    low = _ordered(lowest.to(tl.int32, bitcast=True)).to(tl.int64)  # amounts to enough
    high = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64) + 1  # does not
    while high - low > 1:
        step = (high - low + TRIES - 1) // TRIES
        tried = tl.minimum(low + step * (1 + tl.arange(0, TRIES)), high)
        thresholds = _ordered(tried.to(tl.int32)).to(tl.float32, bitcast=True)
        amounts = _amounts(row_ptr, size, thresholds, top, lowest, COUNTS, TRIES, BLOCK)
        # Nothing lies beyond the largest logit, whatever `high` looks like as a float.
        enough = (amounts >= wanted) & (tried < high)
        num_enough = tl.sum(enough.to(tl.int64))
        low += step * num_enough
        high = tl.minimum(low + step, high)
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _filter_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    size,
    stride,
    FARTHEST: tl.constexpr,
    TRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the threshold by trying several at once, each time between closer bounds."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + place, place < size, other=-float("inf"))
        most = tl.maximum(most, x)
    top = tl.max(most, axis=0)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    smallest = tl.full((), -float("inf"), tl.float32)
    threshold = tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-38)), smallest)
    last = smallest
    if (top_k > 0) & (top_k < size):
        last = _largest_reaching(
            row_ptr, size, top_k.to(tl.float64), top, smallest, True, TRIES, BLOCK
        )
        threshold = tl.maximum(threshold, last)
    if top_p < 1:
        lowest = tl.maximum(last, top - FARTHEST)
        each = tl.zeros((TRIES,), tl.float32) + lowest
        total = tl.max(_amounts(row_ptr, size, each, top, lowest, False, TRIES, BLOCK), axis=0)
        if last > smallest:  # exactly top_k tokens weigh, however many are as likely as the last
            reach = tl.max(_amounts(row_ptr, size, each, top, lowest, True, TRIES, BLOCK), axis=0)
            total -= (reach - top_k).to(tl.float64) * tl.exp(last - top).to(tl.float64)
        wanted = total * top_p.to(tl.float64)
        nucleus = _largest_reaching(row_ptr, size, wanted, top, lowest, False, TRIES, BLOCK)
        threshold = tl.maximum(threshold, nucleus)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + place, place < size, other=-float("inf"))
        out = tl.where(x < threshold, -float("inf"), x)
        tl.store(out_ptr + row.to(tl.int64) * size + place, out, place < size)


def filter_logits_triton(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`filter_logits` without a question to the device."""
    num_rows, size = logits.shape
    out = logits.new_empty((num_rows, size))
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    if num_rows:
        _filter_kernel[(num_rows,)](
            logits,
            top_k,
            top_p,
            min_p,
            out,
            size,
            logits.stride(0),
            FARTHEST=_FARTHEST,
            TRIES=_TRIES,
            BLOCK=_BLOCK,
            num_warps=16,
        )
    return out
