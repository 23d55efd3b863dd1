"""Batched products of small experts equal expert-by-expert products, row by row."""

import pytest
import torch

from musespark.ops.silu_mul import silu_mul
from musespark.ops.small_experts import are_small, small_experts

NUM_EXPERTS, WIDTH, INNER = 12, 24, 20


def expected_row(hidden_states, expert, gate_up, down):
    inner = silu_mul((hidden_states @ gate_up[expert].T).float()).to(hidden_states.dtype)
    return inner @ down[expert].T


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 17, 300])
@pytest.mark.parametrize("top_k", [1, 5, NUM_EXPERTS])
@pytest.mark.parametrize("absent", [False, True])
def test_rows_equal_those_of_each_expert(num_tokens, top_k, absent):
    generator = torch.Generator().manual_seed(num_tokens * 100 + top_k)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, WIDTH, generator=generator) / WIDTH**0.5
    down = torch.randn(NUM_EXPERTS, WIDTH, INNER, generator=generator) / INNER**0.5
    hidden_states = torch.randn(num_tokens, WIDTH, generator=generator)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :top_k]
    if absent:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -1)
    found = small_experts(hidden_states, ids, gate_up, down)
    assert found is not None
    rows, row = found
    assert row.shape == ids.shape
    assert torch.equal(row < 0, ids < 0)
    used = row[row >= 0]
    assert len(used.unique()) == used.numel()  # no two routes share a row
    for token, slot in (ids >= 0).nonzero().tolist():
        expected = expected_row(hidden_states[token], ids[token, slot], gate_up, down)
        torch.testing.assert_close(rows[row[token, slot]], expected, rtol=1e-5, atol=1e-6)


def test_too_many_rows_are_left_to_the_other_way():
    ids = torch.zeros(9000, 1, dtype=torch.int64)  # all to one expert: padding would be enormous
    weights = torch.zeros(NUM_EXPERTS, 2 * INNER, WIDTH), torch.zeros(NUM_EXPERTS, WIDTH, INNER)
    assert small_experts(torch.zeros(9000, WIDTH), ids, *weights) is None


def test_large_experts_are_not_small():
    assert are_small(torch.empty(1, 512, 256), torch.empty(1, 256, 256))
    assert not are_small(torch.empty(1, 2048, 1024), torch.empty(1, 1024, 1024))
