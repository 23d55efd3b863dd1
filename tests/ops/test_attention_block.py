"""Attention of blocks over the paged cache, against one dense attention with an explicit mask."""

import pytest
import torch
from tests.ops.accuracy import F64, seeded

from musespark.ops.attention_block import attention_block, attention_block_reference, block_view

HEAD_DIM, BLOCKS = 8, 40


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=seeded(seed), dtype=F64).to(dtype)


class Step:
    """Blocks of some sequences, and caches full of other numbers where nothing was written."""

    def __init__(self, lens, num_tokens, block_size, heads, kv_heads, dtype=F64, first_block=0):
        batch, width = len(lens), -(-max(lens, default=0) // block_size) + 1
        order = torch.randperm(BLOCKS, generator=seeded(1))[: batch * width]
        table = order.view(batch, width)
        self.lens, self.block_size, self.num_tokens = lens, block_size, num_tokens
        self.table = table[:, first_block:]
        self.key_start = torch.full((batch,), first_block * block_size)
        size = (batch, num_tokens)
        self.query = random(*size, heads, HEAD_DIM, seed=2, dtype=dtype)
        self.key = random(*size, kv_heads, HEAD_DIM, seed=3, dtype=dtype)
        self.value = random(*size, kv_heads, HEAD_DIM, seed=4, dtype=dtype)
        self.caches = [
            random(BLOCKS, block_size, kv_heads, HEAD_DIM, seed=seed, dtype=dtype) * 10
            for seed in (5, 6)
        ]
        self.context = [
            [cache[table[row]].flatten(0, 1)[:length] for row, length in enumerate(lens)]
            for cache in self.caches
        ]

    def view(self, window, causal=True):
        return block_view(
            self.table,
            self.block_size,
            self.key_start,
            torch.tensor(self.lens, dtype=torch.int64),
            self.num_tokens,
            window,
            causal=causal,
        )

    def run(self, window=None, causal=True, scale=0.5, attend=attention_block):
        view = self.view(window, causal)
        return attend(self.query, self.key, self.value, *self.caches, view, scale)

    def expected(self, window=None, causal=True, scale=0.5):
        out = torch.empty_like(self.query, dtype=F64)
        group = self.query.shape[2] // self.key.shape[2]
        for row, length in enumerate(self.lens):
            key = torch.cat((self.context[0][row], self.key[row])).to(F64)
            value = torch.cat((self.context[1][row], self.value[row])).to(F64)
            at = torch.arange(length, length + self.num_tokens)[:, None]
            position = torch.arange(length + self.num_tokens)
            seen = (position <= at) | ((position >= length) & (not causal))
            if window is not None:
                seen &= position > at - window
            for head in range(self.query.shape[2]):
                scores = self.query[row, :, head].to(F64) @ key[:, head // group].T * scale
                weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
                out[row, :, head] = weights @ value[:, head // group]
        return out


SHAPES = [
    ([9], 1, 4, 2, 1),
    ([9, 0, 17, 3], 5, 4, 4, 2),
    ([1], 7, 16, 3, 3),
    ([16, 15, 14], 8, 8, 8, 1),
    ([17, 2], 3, 1, 2, 2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [attention_block, attention_block_reference])
def test_equals_dense_attention(shape, window, causal, attend):
    lens, num_tokens, block_size, heads, kv_heads = shape
    step = Step(lens, num_tokens, block_size, heads, kv_heads)
    found = step.run(window, causal, attend=attend)
    assert (found - step.expected(window, causal)).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    step = Step([9, 0, 17, 3], 5, 4, 4, 2, dtype=dtype)
    found = step.run(8)
    assert found.dtype == dtype
    exact = step.expected(8)
    assert (found - exact).abs().max() < (1e-5 if dtype == torch.float32 else 0.2)


def test_no_sequences():
    assert Step([], 5, 4, 4, 2).run(8).shape == (0, 5, 4, HEAD_DIM)


def test_a_table_that_begins_late_is_enough_for_a_window():
    whole, late = (Step([21, 19], 3, 4, 2, 1, first_block=first) for first in (0, 3))
    assert torch.equal(whole.run(6), late.run(6))


def test_a_window_reads_no_more_blocks_than_it_spans():
    step = Step([37, 2], 3, 4, 2, 1)
    assert step.view(None).block_table.shape == (2, 11)
    assert step.view(6).block_table.shape == (2, 3)
    assert step.view(1).block_table.shape == (2, 1)


def test_what_lies_behind_a_sequence_is_not_seen():
    step = Step([9, 2], 3, 4, 2, 1)
    before = step.run()
    for cache in step.caches:
        stale = torch.ones(BLOCKS, 4, dtype=torch.bool)
        for row, length in enumerate(step.lens):
            places = torch.arange(length)
            stale[step.table[row, places // 4], places % 4] = False
        cache[stale] = 1e6
    assert torch.equal(before, step.run())
