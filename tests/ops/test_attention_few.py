"""Attention of few new tokens per sequence, alone and beside others, against float64."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, F64
from tests.ops.test_attention import SCALE, assert_attention, exact_prefill, heads, paged

from musespark.ops.attention_decode import decode_mask
from musespark.ops.attention_few import attention_few, attention_few_reference, few_tokens
from musespark.ops.attention_paged import PagedSequences, attention_paged

BLOCK_SIZE = 4
# (new tokens, all tokens, first key) of each sequence; the last begin at a window of 6.
SEQUENCES = {
    "one": ([3], [3], [0]),
    "ragged": ([2, 5, 1, 8, 3], [9, 5, 17, 8, 33], [0] * 5),
    "behind a window": ([2, 4, 3], [21, 13, 8], [12, 4, 0]),
}
CASES = [(which, window) for which in ("one", "ragged") for window in (None, 1, 6, 100)]
CASES += [("behind a window", 1), ("behind a window", 6)]


def check(actual, contents, query, new, window, rounds_once):
    start = 0
    for (key, value), count in zip(contents, new, strict=True):
        rows = slice(start, start + count)
        exact = exact_prefill(query[rows], key, value, SCALE, window)
        assert_attention(actual[rows], exact, rounds_once=rounds_once)
        start += count


@pytest.mark.parametrize("op", [attention_few, attention_few_reference])
@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("which", "window"), CASES)
def test_few_tokens_equal_the_formula(op, dtype, window, group, which):
    new, seq_lens, key_starts = SEQUENCES[which]
    contents, cache, table = paged(seq_lens, key_starts, BLOCK_SIZE, 2, dtype)
    query = heads(sum(new), 2 * group, dtype, 7)
    starts, lengths, counts = (torch.tensor(n) for n in (key_starts, seq_lens, new))
    few = few_tokens(table, BLOCK_SIZE, starts, lengths, counts, window)
    assert few.rows.shape == (len(new), max(new))
    actual = op(query, *cache, few, SCALE)
    assert actual.dtype == dtype
    check(actual, contents, query, new, window, op is attention_few_reference)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("num_few", [0, 2])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_beside_sequences_that_decode_and_that_prefill(window, num_few, num_decodes):
    new = [1] * num_decodes + [3, 2][:num_few] + [9, 4]
    seq_lens = [7, 18][:num_decodes] + [5, 21][:num_few] + [9, 11]
    starts = torch.tensor([0] * len(new))
    contents, cache, table = paged(seq_lens, starts.tolist(), BLOCK_SIZE, 2, F32)
    query = heads(sum(new), 6, F32, 7)
    lengths = torch.tensor(seq_lens)
    decodes, part = slice(num_decodes), slice(num_decodes, num_decodes + num_few)
    mask = decode_mask(table[decodes], BLOCK_SIZE, starts[decodes], lengths[decodes], window)
    few = None
    if num_few:
        counts = torch.tensor(new)[part]
        few = few_tokens(table[part], BLOCK_SIZE, starts[part], lengths[part], counts, window)
    sequences = PagedSequences(
        num_decodes=num_decodes,
        query_start=tuple(sum(new[:i]) for i in range(len(new) + 1)),
        seq_lens=tuple(seq_lens),
        key_start=(0,) * len(new),
        block_table=table,
        decode_table=table[decodes],
        decode_mask=mask,
        slot_mapping=torch.empty(0),
        on_device=None,
        few=few,
    )
    actual = attention_paged(query, cache[0], cache[1], sequences, SCALE, window)
    check(actual, contents, query, new, window, rounds_once=True)
