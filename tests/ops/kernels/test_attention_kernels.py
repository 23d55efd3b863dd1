"""Attention kernels over the paged cache against a float64 softmax over the keys a query sees."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64, assert_within
from tests.ops.kernels.device import DEVICE, needs_kernels, on_device, on_gpu
from tests.ops.test_attention import HEAD_DIM, SCALE, exact_prefill, exact_row, heads, paged

from musespark.ops.attention_decode import attention_decode_triton
from musespark.ops.attention_paged import (
    PagedSequences,
    SequencesOnDevice,
    attention_paged,
    attention_paged_triton,
)
from musespark.ops.attention_prefill import attention_prefill_triton
from musespark.ops.output_gate import output_gate_reference

pytestmark = needs_kernels

# Softmax weights and outputs are rounded to bfloat16 each.
BOUND = {BF16: 2.0**-7, F32: 1e-5}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def sequences_of(table, new, seq_lens, key_starts):
    """The step's sequences: `new` tokens each, those with one at the front."""
    num_decodes = sum(count == 1 for count in new)
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    on_device = SequencesOnDevice(int32(*starts), int32(*seq_lens), int32(*key_starts))
    return PagedSequences(
        num_decodes=num_decodes,
        query_start=tuple(starts),
        seq_lens=tuple(seq_lens),
        key_start=tuple(key_starts),
        block_table=table.to(DEVICE),
        decode_table=torch.empty(0),
        decode_mask=torch.empty(0),
        slot_mapping=torch.empty(0),
        on_device=on_device,
    )


def check(new, seq_lens, key_starts, *, group=3, kv_heads=2, window=None, block_size=4, dtype=F32):
    contents, cache, table = paged(seq_lens, key_starts, block_size, kv_heads, dtype)
    query = heads(sum(new), group * kv_heads, dtype, 7)
    sequences = sequences_of(table, new, seq_lens, key_starts)
    actual = attention_paged_triton(*on_device(query, *cache, sequences, SCALE, window)).cpu()
    assert actual.dtype == dtype
    for row, (key, value) in enumerate(contents):
        rows = slice(sequences.query_start[row], sequences.query_start[row + 1])
        exact, size = exact_prefill(query[rows], key, value, SCALE, window)
        assert_within(actual[rows], exact, BOUND[dtype] * size)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode(dtype, window, block_size):
    check([1] * 4, [8, 1, 9, 31], [0] * 4, window=window, block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("window", [4, 5, 8])
def test_tables_that_begin_at_the_window(window):
    seq_lens = [3, 8, 21, 33]
    starts = [max(0, n - window) // 4 * 4 for n in seq_lens]
    check([1] * 4, seq_lens, starts, window=window)
    new = [2, 3, 5, 6]
    starts = [max(0, n - c - window + 1) // 4 * 4 for n, c in zip(seq_lens, new, strict=True)]
    check(new, seq_lens, starts, window=window)


@pytest.mark.parametrize("group", [1, 5, 8])
def test_groups_of_heads(group):
    check([1, 1], [6, 3], [0, 0], group=group)
    check([4, 2], [6, 3], [0, 0], group=group)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_prefill(dtype, window):
    check([7, 13, 2], [7, 21, 42], [0, 0, 0], window=window, dtype=dtype)


@pytest.mark.parametrize("window", [None, 33, 64, 100, 128])
def test_long_prompts_have_steps_without_a_mask(window):
    check([3, 40], [200, 170], [0, 0], window=window, kv_heads=1, group=2, block_size=16)


@pytest.mark.parametrize("window", [None, 5])
def test_mixed_batches(window):
    check([1, 1, 9, 2, 5], [4, 19, 9, 33, 6], [0] * 5, window=window)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("new", [[1, 1], [1, 3], [4, 2]])
def test_the_output_gate_is_applied_on_the_way(new, splits, monkeypatch):
    monkeypatch.setattr("musespark.ops.attention_decode._num_splits", lambda *_: splits)
    seq_lens = [6, 300]
    contents, cache, table = paged(seq_lens, [0, 0], 4, 2, F32)
    fused = heads(sum(new), 8, F32, 7)  # queries and gates side by side
    query, gate = fused[:, :4], 3 * fused[:, 4:]
    sequences = sequences_of(table, new, seq_lens, [0, 0])
    arguments = on_device(query, *cache, sequences, SCALE)
    actual = attention_paged_triton(*arguments, gate=gate.to(DEVICE), gate_eps=1e-5).cpu()
    for row, (key, value) in enumerate(contents):
        rows = slice(sequences.query_start[row], sequences.query_start[row + 1])
        attended, _ = exact_prefill(query[rows], key, value, SCALE, None)
        exact = output_gate_reference(attended, gate[rows].to(F64), 1e-5)
        assert_within(actual[rows], exact, 2e-5)


def test_many_parts_equal_one(monkeypatch):
    _, cache, table = paged([300], [0], 16, 1, F32)
    query = heads(1, 2, F32, 7).to(DEVICE)
    outputs = []
    for splits in (1, 4, 16):
        monkeypatch.setattr("musespark.ops.attention_decode._num_splits", lambda *_, s=splits: s)
        outputs.append(
            attention_decode_triton(*on_device(query, *cache, table, int32(0), int32(300), SCALE))
        )
    assert_within(outputs[1].cpu(), outputs[0].cpu(), 1e-6)
    assert_within(outputs[2].cpu(), outputs[0].cpu(), 1e-6)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_sequences_that_the_device_leaves_out(first):
    new, seq_lens = [1, 1, 5], [4, 19, 9]
    contents, cache, table = paged(seq_lens, [0] * 3, 4, 2, F32)
    query = heads(7, 4, F32, 7)
    out = torch.full((7, 4, HEAD_DIM), 7.0, device=DEVICE)
    numbers = int32(0, 1, 2, 7), int32(0, 0, 0), int32(*seq_lens)
    arguments = on_device(query, *cache, table, *numbers, SCALE)
    attention_prefill_triton(*arguments, first_sequence=int32(first), out=out)
    assert bool((out[: [0, 1, 2, 7][first]] == 7.0).all())
    for row in range(first, len(new)):
        rows = slice(sum(new[:row]), sum(new[: row + 1]))
        key, value = contents[row]
        exact, size = exact_prefill(query[rows], key, value, SCALE, None)
        assert_within(out[rows].cpu(), exact, BOUND[F32] * size)


def test_padding_rows_are_zero():
    _, cache, table = paged([5, 9], [0, 0], 4, 2, F32)
    table[0] = -1  # never read
    out = attention_decode_triton(
        *on_device(heads(2, 4, F32, 7), *cache, table, int32(0, 0), int32(0, 9), SCALE)
    )
    assert bool((out[0] == 0).all())
    assert bool((out[1] != 0).any())


def test_eight_bit_cache():
    new, seq_lens = [1, 4], [9, 11]
    _, cache, table = paged(seq_lens, [0, 0], 4, 2, BF16)
    eight_bits = [c.clamp(-400, 400).to(torch.float8_e4m3fn) for c in cache]
    query = heads(5, 4, BF16, 7)
    sequences = sequences_of(table, new, seq_lens, [0, 0])
    actual = attention_paged_triton(*on_device(query, *eight_bits, sequences, SCALE)).cpu()
    for row, rows in enumerate((slice(0, 1), slice(1, 5))):
        key, value = (c.to(BF16)[table[row]].flatten(0, 1)[: seq_lens[row]] for c in eight_bits)
        exact, size = exact_prefill(query[rows], key, value, SCALE, None)
        assert_within(actual[rows], exact, BOUND[BF16] * size)


@pytest.mark.parametrize(
    ("new", "seq_lens", "window", "head_dim"),
    on_gpu(
        ([1] * 5, [1, 700, 2049, 5000, 16], None, 64),
        ([1] * 5, [1, 700, 2049, 5000, 16], 2048, 64),
        ([1, 1, 700, 65], [900, 3, 2900, 65], None, 64),
        ([1, 1, 700, 65], [900, 3, 2900, 65], 512, 64),
        ([1, 130], [600, 140], 128, 128),
        ([1, 130], [600, 140], None, 32),
    ),
)
@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn])
def test_released_head_counts(new, seq_lens, window, head_dim, cache_dtype):
    kv_heads, heads_per_kv, block = 4, 8, 16
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)

    counts = [-(-n // block) for n in seq_lens]
    order = torch.randperm(sum(counts), generator=generator, device=DEVICE)
    table = torch.zeros(len(new), max(counts), dtype=torch.int64, device=DEVICE)
    for row, count in enumerate(counts):
        table[row, :count] = order[sum(counts[:row]) : sum(counts[:row]) + count]
    cache = [normal(sum(counts), block, kv_heads, head_dim).to(cache_dtype) for _ in range(2)]
    query = normal(sum(new), kv_heads * heads_per_kv, head_dim)
    sequences = sequences_of(table, new, seq_lens, [0] * len(new))
    actual = attention_paged_triton(query, cache[0], cache[1], sequences, 0.3, window)
    for row in range(len(new)):
        key, value = (c[table[row]].flatten(0, 1)[: seq_lens[row]].to(torch.float64) for c in cache)
        for token in sorted({0, new[row] // 2, new[row] - 1}):
            at = sequences.query_start[row] + token
            end = seq_lens[row] - new[row] + token + 1
            exact, size = exact_row(query[at], key[:end], value[:end], 0.3, window)
            assert_within(actual[at], exact, BOUND[BF16] * size)


def test_equals_the_torch_version_when_only_prefilling():
    _, cache, table = paged([9, 21], [0, 0], 4, 2, F32)
    query = heads(12, 4, F32, 7)
    sequences = sequences_of(table, [7, 5], [9, 21], [0, 0])
    cache = on_device(*cache)
    one = attention_paged_triton(*on_device(query, *cache, sequences, SCALE, 6))
    other = attention_paged(*on_device(query, *cache, sequences, SCALE, 6))
    assert one.shape == other.shape == (12, 4, HEAD_DIM)
    assert_within(one.cpu(), other.cpu(), 1e-4)
