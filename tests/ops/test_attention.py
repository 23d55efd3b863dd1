"""Prefill and decode attention against a plain float64 softmax over the keys a query sees."""

import math

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_rounded_once, assert_within, randn, seeded

from musespark.ops.attention_decode import (
    attention_decode,
    attention_decode_reference,
    decode_mask,
    gather_blocks,
)
from musespark.ops.attention_prefill import attention_prefill, attention_prefill_reference

HEAD_DIM = 16
SCALE = 5.4730064863875 / math.sqrt(HEAD_DIM)
PREFILL = [attention_prefill, attention_prefill_reference]


def exact_row(query, key, value, scale, window):
    """The newest position's query [heads, d] over all keys [S, kv_heads, d]: (out, sum w |v|)."""
    first = 0 if window is None else max(0, len(key) - window)
    group = query.shape[0] // key.shape[1]
    out, size = [], []
    for head in range(query.shape[0]):
        keys, values = key[first:, head // group].to(F64), value[first:, head // group].to(F64)
        weights = (keys @ query[head].to(F64) * scale).softmax(0)
        out.append(weights @ values)
        size.append(weights @ values.abs())
    return torch.stack(out), torch.stack(size)


def exact_prefill(query, key, value, scale, window):
    before = len(key) - len(query)
    rows = [
        exact_row(q, key[: before + t + 1], value[: before + t + 1], scale, window)
        for t, q in enumerate(query)
    ]
    if not rows:
        return query.to(F64), query.to(F64)
    return torch.stack([out for out, _ in rows]), torch.stack([size for _, size in rows])


def assert_attention(actual, exact_and_size, rounds_once):
    exact, size = exact_and_size
    if rounds_once and actual.dtype == BF16:
        # Scores up to about 15 in float32: weights are off by a few 1e-6.
        assert_rounded_once(actual, exact, 10 * size)
    else:
        # The fused kernel also rounds the softmax weights to bfloat16 (2^-8, as the output).
        bound = {BF16: 2.0**-7, F32: 1e-5, F64: 1e-13}[actual.dtype]
        assert_within(actual, exact, bound * size)


def heads(tokens, num_heads, dtype, seed):
    """Normed as the model norms queries and keys."""
    x = randn(tokens, num_heads, HEAD_DIM, seed=seed)
    return (x / x.square().mean(-1, keepdim=True).sqrt()).to(dtype)


def case(new, old, num_heads, num_kv_heads, dtype):
    query = heads(new, num_heads, dtype, 1)
    key = heads(new + old, num_kv_heads, dtype, 2)
    return query, key, randn(new + old, num_kv_heads, HEAD_DIM, dtype=dtype, seed=3)


@pytest.mark.parametrize("op", PREFILL)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("window", [None, 1, 3, 20, 21, 1000])
@pytest.mark.parametrize(("new", "old"), [(1, 0), (1, 20), (7, 0), (13, 8), (21, 0), (2, 40)])
def test_prefill_equals_the_formula(op, dtype, window, new, old):
    query, key, value = case(new, old, 4, 2, dtype)
    actual = op(query, key, value, SCALE, window)
    assert actual.dtype == dtype
    exact = exact_prefill(query, key, value, SCALE, window)
    assert_attention(actual, exact, rounds_once=op is attention_prefill_reference)


@pytest.mark.parametrize("op", PREFILL)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(n * g, n) for n in (1, 3) for g in range(1, 9)]
)
def test_prefill_groups_of_heads(op, num_heads, num_kv_heads):
    query, key, value = case(5, 3, num_heads, num_kv_heads, F32)
    exact = exact_prefill(query, key, value, SCALE, 4)
    assert_attention(op(query, key, value, SCALE, 4), exact, rounds_once=True)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize(("new", "old"), [(127, 0), (128, 5), (129, 0), (300, 31)])
@pytest.mark.parametrize("window", [5, 128, 200])
def test_prefill_chunks_of_a_windowed_layer(dtype, new, old, window):
    """Longer than the chunks that a windowed layer is cut into, at and beside their ends."""
    query, key, value = case(new, old, 2, 1, dtype)
    actual = attention_prefill(query, key, value, SCALE, window)
    exact = exact_prefill(query, key, value, SCALE, window)
    assert_attention(actual, exact, rounds_once=False)


@pytest.mark.parametrize("op", PREFILL)
def test_prefill_keys_may_begin_where_the_window_does(op):
    query, key, value = case(6, 30, 4, 2, F32)
    key[21] = query[0, 0]  # the one that head 0 attends to most
    value[21] = 10
    whole = op(query, key, value, SCALE, 10)
    assert_within(op(query, key[21:], value[21:], SCALE, 10), whole, 1e-4)
    # One key later, the first query misses a key that it should see.
    assert not torch.allclose(op(query, key[22:], value[22:], SCALE, 10), whole, atol=0.1)


@pytest.mark.parametrize("op", PREFILL)
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_of_no_tokens(op, window):
    query, key, value = case(0, 0, 4, 2, F32)
    assert op(query, key, value, SCALE, window).shape == (0, 4, HEAD_DIM)


@pytest.mark.parametrize("op", PREFILL)
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_non_contiguous(op, window):
    fused = randn(9, 8, HEAD_DIM)
    query, key, value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    plain = op(query.contiguous(), key.contiguous(), value.contiguous(), SCALE, window)
    assert_within(op(query, key, value, SCALE, window), plain, 1e-6)


@pytest.mark.parametrize("op", PREFILL)
def test_prefill_never_looks_ahead_or_behind_the_window(op):
    query, key, value = case(8, 0, 2, 1, F32)
    before = op(query, key, value, SCALE, 3)
    value[4] += 100
    changed = (op(query, key, value, SCALE, 3) != before).flatten(1).any(1)
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False]


# --- decode ---------------------------------------------------------------------------------------


def paged(seq_lens, key_starts, block_size, num_kv_heads, dtype):
    """Random sequences, and a cache that holds them in scattered blocks among garbage."""
    sequences = [
        (
            heads(n, num_kv_heads, dtype, 10 + i),
            randn(n, num_kv_heads, HEAD_DIM, dtype=dtype, seed=50 + i),
        )
        for i, n in enumerate(seq_lens)
    ]
    counts = [-(-(n - s) // block_size) for n, s in zip(seq_lens, key_starts, strict=True)]
    order = torch.randperm(sum(counts) + 3, generator=seeded(4)).tolist()
    shape = (sum(counts) + 3, block_size, num_kv_heads, HEAD_DIM)
    key_cache = randn(*shape, seed=5, scale=30.0).to(dtype)  # stale keys would win the softmax
    value_cache = randn(*shape, seed=6, scale=1e4).to(dtype)
    table = torch.full((len(seq_lens), max(counts, default=0)), order.pop())
    for row, ((key, value), start) in enumerate(zip(sequences, key_starts, strict=True)):
        for column in range(counts[row]):
            block = order.pop()
            table[row, column] = block
            chunk = slice(start + column * block_size, start + (column + 1) * block_size)
            key_cache[block, : len(key[chunk])] = key[chunk]
            value_cache[block, : len(value[chunk])] = value[chunk]
    return sequences, (key_cache, value_cache), table


def decode(op, query, cache, table, key_starts, seq_lens, window):
    key_cache, value_cache = cache
    starts, lengths = torch.tensor(key_starts), torch.tensor(seq_lens)
    if op is attention_decode_reference:
        return op(query, key_cache, value_cache, table, starts, lengths, SCALE, window)
    mask = decode_mask(table, key_cache.shape[1], starts, lengths, window)
    return op(query, key_cache, value_cache, table, mask, SCALE)


DECODE = [attention_decode, attention_decode_reference]
FULL = [([1], [0]), ([5], [0]), ([8, 1, 9, 16, 31], [0] * 5), ([4, 4, 4], [0] * 3)]


@pytest.mark.parametrize("op", DECODE)
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize(("seq_lens", "key_starts"), FULL)
@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_equals_the_formula(op, dtype, seq_lens, key_starts, window, block_size):
    sequences, cache, table = paged(seq_lens, key_starts, block_size, 2, dtype)
    query = heads(len(seq_lens), 6, dtype, 7)
    actual = decode(op, query, cache, table, key_starts, seq_lens, window)
    assert actual.dtype == dtype
    for row, (key, value) in enumerate(sequences):
        exact = exact_row(query[row], key, value, SCALE, window)
        assert_attention(actual[row], exact, rounds_once=op is attention_decode_reference)


@pytest.mark.parametrize("op", DECODE)
@pytest.mark.parametrize("window", [4, 5, 7, 8])
def test_decode_tables_that_begin_at_the_window(op, window):
    """Blocks behind the window are given back, so that tables start at different positions."""
    seq_lens = [3, 8, 9, 21, 32, 33]
    key_starts = [max(0, n - window) // 4 * 4 for n in seq_lens]
    assert len(set(key_starts)) >= 3
    sequences, cache, table = paged(seq_lens, key_starts, 4, 1, F32)
    query = heads(len(seq_lens), 3, F32, 7)
    actual = decode(op, query, cache, table, key_starts, seq_lens, window)
    for row, (key, value) in enumerate(sequences):
        exact = exact_row(query[row], key, value, SCALE, window)
        assert_attention(actual[row], exact, rounds_once=True)


@pytest.mark.parametrize("op", DECODE)
@pytest.mark.parametrize("group", range(1, 9))
def test_decode_groups_of_heads(op, group):
    sequences, cache, table = paged([6, 3], [0, 0], 4, 2, F32)
    query = heads(2, 2 * group, F32, 7)
    actual = decode(op, query, cache, table, [0, 0], [6, 3], None)
    for row, (key, value) in enumerate(sequences):
        assert_attention(actual[row], exact_row(query[row], key, value, SCALE, None), True)


def test_decode_of_no_sequences():
    key_cache = torch.zeros(2, 4, 2, HEAD_DIM)
    table = torch.zeros(0, 1, dtype=torch.int64)
    query = torch.zeros(0, 4, HEAD_DIM)
    out = decode(attention_decode, query, (key_cache, key_cache), table, [], [], None)
    assert out.shape == (0, 4, HEAD_DIM)


def test_decode_reads_a_cache_of_another_dtype():
    sequences, cache, table = paged([9], [0], 4, 1, BF16)
    query = heads(1, 2, F32, 7)
    actual = decode(attention_decode, query, cache, table, [0], [9], None)
    assert actual.dtype == F32
    key, value = sequences[0]
    assert_attention(actual[0], exact_row(query[0], key, value, SCALE, None), True)


def test_gather_blocks_keeps_the_order_of_the_table():
    cache = torch.arange(24.0).view(4, 3, 1, 2)
    picked = gather_blocks(cache, torch.tensor([[2, 0], [3, 3]]))
    assert torch.equal(picked[0], torch.cat([cache[2], cache[0]]))
    assert torch.equal(picked[1], torch.cat([cache[3], cache[3]]))
    assert torch.equal(gather_blocks(cache, torch.tensor([1])), cache[1])
