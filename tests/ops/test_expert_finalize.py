import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, randn, seeded

from musespark.ops import expert_finalize as module
from musespark.ops.expert_finalize import expert_finalize, tokens_per_chunk

EPS = 1e-8


def exact_finalize(rows, weights, index, gain):
    """Route by route in float64, and the size of the summed terms."""
    out = torch.zeros(len(index), rows.shape[1], dtype=F64)
    size = torch.zeros_like(out)
    for token, slots in enumerate(index.tolist()):
        for slot, row in enumerate(slots):
            if row < 0:
                continue
            scaled = rows[row].to(F64) * gain.to(F64)
            term = scaled / (scaled.square().mean() + EPS).sqrt() * weights[token, slot].to(F64)
            out[token] += term
            size[token] += term.abs()
    return out, size


def inputs(tokens, top_k, width, dtype, extra_rows=0):
    """Routes that read a random choice of rows; the rows nobody reads hold NaN."""
    wide = F64 if dtype == F64 else F32
    num_rows = tokens * top_k + extra_rows
    index = torch.randperm(num_rows, generator=seeded(1))[: tokens * top_k].view(tokens, top_k)
    rows = randn(num_rows, width, dtype=dtype, seed=2, scale=2.0)
    unread = torch.ones(num_rows, dtype=torch.bool)
    unread[index.flatten()] = False
    rows[unread] = float("nan")
    weights = torch.rand(tokens, top_k, generator=seeded(3)).to(wide)
    gain = (1 + 0.3 * randn(width, seed=4)).to(wide)
    return rows, weights, index, gain


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "width"), [(0, 2, 8), (1, 1, 1), (1, 8, 64), (13, 3, 33), (4, 2, 256)]
)
@pytest.mark.parametrize("extra_rows", [0, 1, 50])
def test_equals_the_formula(dtype, tokens, top_k, width, extra_rows):
    rows, weights, index, gain = inputs(tokens, top_k, width, dtype, extra_rows)
    actual = expert_finalize(rows, weights, index, gain, EPS)
    assert actual.shape == (tokens, width)
    assert actual.dtype == dtype
    assert_rounded_once(actual, *exact_finalize(rows, weights, index, gain))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("share", [0.2, 0.8, 1.0])
def test_routes_elsewhere_leave_no_trace(dtype, share):
    rows, weights, index, gain = inputs(9, 4, 24, dtype, extra_rows=7)
    elsewhere = torch.rand(index.shape, generator=seeded(5)) < share
    # What other ranks own may hold anything, in the first row too: -1 must not become row 0.
    rows[index[elsewhere]] = float("nan")
    rows[0] = float("nan")
    elsewhere |= index == 0
    index = index.masked_fill(elsewhere, -1)
    weights = weights.masked_fill(elsewhere, float("inf"))
    actual = expert_finalize(rows, weights.masked_fill(elsewhere, 7.0), index, gain, EPS)
    assert bool(actual.isfinite().all())
    assert_rounded_once(actual, *exact_finalize(rows, weights, index, gain))


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_rank_without_any_route_returns_zeros(tokens):
    index = torch.full((tokens, 3), -1)
    rows = torch.empty(0, 16, dtype=BF16)
    actual = expert_finalize(rows, torch.zeros(tokens, 3), index, torch.ones(16), EPS)
    assert torch.equal(actual, torch.zeros(tokens, 16, dtype=BF16))


@pytest.mark.parametrize("limit", [1, 24 * 4, 24 * 4 * 3 + 5])
def test_chunks_make_no_difference(monkeypatch, limit):
    rows, weights, index, gain = inputs(10, 4, 24, BF16, extra_rows=3)
    index[::3, 1] = -1
    whole = expert_finalize(rows, weights, index, gain, EPS)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", limit)
    assert tokens_per_chunk(4, 24) < 10
    assert torch.equal(expert_finalize(rows, weights, index, gain, EPS), whole)


def test_chunks_are_bounded_at_the_released_size():
    assert tokens_per_chunk(8, 4096) * 8 * 4096 * 4 <= 128 * 2**20
    assert tokens_per_chunk(8, 4096) >= 1024
    assert tokens_per_chunk(8, 2**30) == 1


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_non_contiguous_rows_and_independent_tokens(dtype):
    rows, weights, index, gain = inputs(6, 2, 40, dtype)
    whole = expert_finalize(rows, weights, index, gain, EPS)
    strided = torch.stack([rows, rows], dim=1)[:, 0]
    assert torch.equal(expert_finalize(strided, weights, index, gain, EPS), whole)
    single = expert_finalize(rows, weights[4:5], index[4:5], gain, EPS)
    assert torch.equal(single, whole[4:5])
