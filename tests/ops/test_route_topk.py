import pytest
import torch
from tests.ops.accuracy import F32, F64, assert_within, randn

from musespark.ops.route_topk import route_topk


def expected_route(logits, bias, top_k, scale, scoring="sigmoid"):
    """Row by row, in Python: ids by descending biased score, the lowest id among equals."""
    # Float32 scores as the contract asks: ties exist in float32, not in float64.
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else logits.softmax(-1)
    biased = (scores + bias).tolist()
    ids = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:top_k] for row in biased]
    index = torch.tensor(ids, dtype=torch.int64).reshape(len(logits), top_k)
    wide = logits.to(F64)
    exact = 1 / (1 + torch.exp(-wide)) if scoring == "sigmoid" else wide.softmax(-1)
    chosen = exact.gather(1, index)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-15) * scale, index


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 8, 2), (1, 1, 1), (1, 8, 8), (33, 12, 5), (9, 256, 8)]
)
def test_equals_the_formula(scoring, scale, tokens, experts, top_k):
    logits, bias = randn(tokens, experts, scale=2.0), randn(experts, seed=1, scale=0.2)
    weights, ids = route_topk(logits, bias, top_k, scale, scoring=scoring)
    exact, expected_ids = expected_route(logits, bias, top_k, scale, scoring)
    assert torch.equal(ids, expected_ids)
    assert weights.dtype == F32
    assert_within(weights, exact, 2e-6 * exact)


def test_equal_scores_go_to_the_lowest_ids():
    # Enough columns that a sort or a top-k that is not stable would show it.
    logits = torch.tensor([0.0, 1.0, 1.0, 0.0]).repeat(3, 64)
    _, ids = route_topk(logits, torch.zeros(256), 130, 1.0)
    ones = [e for e in range(256) if e % 4 in (1, 2)]
    assert ids.tolist() == [[*ones, 0, 3]] * 3


def test_saturated_scores_tie_as_well():
    # sigmoid(30) and sigmoid(40) are both 1 in float32.
    _, ids = route_topk(torch.tensor([[0.0, 30.0, 40.0, 35.0]]), torch.zeros(4), 2, 1.0)
    assert ids.tolist() == [[1, 2]]


def test_slots_are_in_descending_order_of_the_biased_score():
    logits, bias = randn(50, 16), randn(16, seed=1)
    _, ids = route_topk(logits, bias, 6, 1.0)
    biased = (torch.sigmoid(logits) + bias).gather(1, ids)
    assert bool((biased.diff(dim=1) <= 0).all())


def test_the_bias_selects_and_never_weighs():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain, plain_ids = route_topk(logits, torch.zeros(4), 2, 1.0)
    biased, biased_ids = route_topk(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2, 1.0)
    assert plain_ids.tolist() == [[0, 1]]
    assert biased_ids.tolist() == [[3, 0]]
    scores = torch.sigmoid(logits[0])
    assert_within(biased[0], scores[[3, 0]] / scores[[3, 0]].sum(), 1e-6)
    # A bias that shifts all experts alike changes nothing.
    shifted, shifted_ids = route_topk(logits, torch.full((4,), 0.25), 2, 1.0)
    assert torch.equal(shifted, plain)
    assert torch.equal(shifted_ids, plain_ids)


@pytest.mark.parametrize("padding", [[True] * 4, [False, True, False, True], [False] * 4])
def test_padding_rows_touch_no_expert(padding):
    logits, bias, mask = randn(4, 8), randn(8, seed=1), torch.tensor(padding)
    logits[mask] = float("nan")
    weights, ids = route_topk(logits, bias, 3, 2.5, padding=mask)
    clean, clean_ids = route_topk(logits[~mask], bias, 3, 2.5)
    assert torch.equal(ids[mask], torch.full((int(mask.sum()), 3), -1))
    assert torch.equal(weights[mask], torch.zeros(int(mask.sum()), 3))
    assert torch.equal(ids[~mask], clean_ids)
    assert torch.equal(weights[~mask], clean)


def test_scores_near_zero_still_give_finite_weights():
    weights, _ = route_topk(torch.full((1, 4), -60.0), torch.zeros(4), 2, 1.0)
    # The sum, 2e-26, is far below the 1e-15 that guards the division.
    assert bool((weights < 1e-9).all())
    assert bool(weights.isfinite().all())


def test_non_contiguous_logits_and_independent_rows():
    logits, bias = randn(16, 10).t(), randn(16, seed=1)
    whole = route_topk(logits, bias, 4, 1.0)
    for left, right in zip(whole, route_topk(logits.contiguous(), bias, 4, 1.0), strict=True):
        assert torch.equal(left, right)
    for left, right in zip(whole, route_topk(logits[3:4], bias, 4, 1.0), strict=True):
        assert torch.equal(left[3:4], right)
