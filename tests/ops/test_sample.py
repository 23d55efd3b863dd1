"""Filters against their definition, and sampling against the distribution it must follow."""

import pytest
import torch

from musespark.ops.sample import sample_from_uniform
from musespark.ops.sample_filter import filter_logits
from musespark.ops.sample_logprobs import ranked_logprobs
from musespark.ops.sample_penalties import penalize


def kept_by_definition(logits, top_k, top_p, min_p):
    """The tokens of one row that stay, one at a time, in float64."""
    order = torch.argsort(logits.double(), descending=True).tolist()
    if top_k:
        order = order[:top_k]
    weights = logits.double()[order].softmax(dim=-1).tolist()
    kept, mass = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if mass < top_p and weight >= min_p * weights[0]:
            kept.add(token)
        mass += weight
    return kept


SETTINGS = [
    (top_k, top_p, min_p)
    for top_k in (0, 1, 3, 50, 1500)
    for top_p in (1.0, 0.999, 0.5, 0.01)
    for min_p in (0.0, 0.2, 1.0)
]


def check_filters(logits, filtered, settings):
    """What is kept of each row, by its (top_k, top_p, min_p)."""
    for row, (top_k, top_p, min_p) in enumerate(settings):
        kept = set(filtered[row].isfinite().nonzero()[:, 0].tolist())
        expected = kept_by_definition(logits[row], top_k, top_p, min_p)
        # Sums in float32 may shift the end of a nucleus of thousands by some tokens.
        assert len(kept ^ expected) <= 1 + len(expected) // 500, (top_k, top_p, min_p)
        assert torch.equal(filtered[row, list(kept)], logits[row, list(kept)])


@pytest.mark.parametrize("vocab_size", [7, 300, 3000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_filters_keep_what_their_definitions_say(vocab_size, spread):
    torch.manual_seed(vocab_size)
    logits = torch.randn(len(SETTINGS), vocab_size) * spread
    columns = [torch.tensor(column) for column in zip(*SETTINGS, strict=True)]
    check_filters(logits, filter_logits(logits, *columns), SETTINGS)


def test_equally_likely_tokens_stay_together():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    filtered = filter_logits(logits, torch.tensor([1]), torch.ones(1), torch.zeros(1))
    assert filtered.isfinite().tolist() == [[False, True, True, False]]


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(0)
    logits = torch.randn(6, 5000)
    top_k = torch.tensor([0, 0, 2000, 5, 0, 1])
    top_p = torch.tensor([1.0, 0.9, 0.9, 1.0, 0.2, 0.5])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.3, 0.0])
    together = filter_logits(logits, top_k, top_p, min_p)
    uniform = torch.rand(6, dtype=torch.float64)
    tokens = sample_from_uniform(together, uniform)
    for row in range(6):
        one = slice(row, row + 1)
        alone = filter_logits(logits[one], top_k[one], top_p[one], min_p[one])
        assert torch.equal(together[one], alone)
        assert sample_from_uniform(alone, uniform[one]) == tokens[row]


def test_sampling_follows_the_distribution_exactly():
    logits = torch.tensor([0.3, -torch.inf, 1.1, -2.0, -torch.inf])
    count = 100_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count  # every quantile once
    tokens = sample_from_uniform(logits.expand(count, -1), uniform)
    shares = tokens.bincount(minlength=5) / count
    torch.testing.assert_close(shares, logits.softmax(0), atol=2e-5, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_impossible_tokens_never_come(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 400:600] = 1e-3
    token = sample_from_uniform(logits, torch.tensor([uniform], dtype=torch.float64))
    assert 400 <= int(token) < 600


def test_penalties():
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0]])
    counts = torch.tensor([[0, 2, 1, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[True, False, False, False]])
    penalized = penalize(
        logits, counts, in_prompt, torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0])
    )
    assert penalized.tolist() == [[1.0, -4.0 - 0.5 - 0.5, 1.5 - 0.25 - 0.5, -3.0]]


def test_ranked_logprobs():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0]])
    ranked = ranked_logprobs(logits, torch.tensor([2, 2]), top=2)
    expected = logits.log_softmax(-1)
    assert ranked.logprobs.tolist() == expected[[0, 1], [2, 2]].tolist()
    assert ranked.ranks.tolist() == [2, 1]
    assert ranked.top_ids[0].tolist() == [1, 2]
    assert ranked.top_logprobs[0].tolist() == expected[0, [1, 2]].tolist()
