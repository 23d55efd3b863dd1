"""Attention of prompts on a Hopper GPU: the kernel against float64."""

from itertools import accumulate

import pytest
import torch
from tests.gpu.hopper import needs_hopper
from tests.ops.accuracy import assert_within
from tests.ops.test_attention import exact_row

from musespark.ops.attention_prefill_hopper import (
    attention_prefill_hopper,
    can_prefill_on_hopper,
)

pytestmark = needs_hopper
KV_HEADS, BLOCK, HEAD_DIM, SCALE = 2, 16, 64, 0.3


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("window", [None, 1, 100, 2048])
@pytest.mark.parametrize(
    ("new", "seq_lens", "first", "group"),
    [
        ([1], [1], 0, 8),
        ([17, 300, 2, 65], [17, 1300, 513, 3000], 0, 8),
        ([1, 1, 129, 24, 25], [40, 1, 129, 2500, 2100], 2, 8),
        ([1, 1], [40, 7], 2, 8),
        ([1, 1, 40], [9, 0, 40], 1, 8),
        ([130, 60], [130, 600], 0, 3),
    ],
)
def test_prompts(new, seq_lens, first, group, window):
    generator = torch.Generator("cuda").manual_seed(len(new))

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    # Whatever no query sees is NaN, and tables end in blocks that do not exist.
    reach = 1 << 30 if window is None else window
    starts = [
        max(0, n - c - reach + 1) // BLOCK * BLOCK for n, c in zip(seq_lens, new, strict=True)
    ]
    counts = [-(-(n - s) // BLOCK) for n, s in zip(seq_lens, starts, strict=True)]
    order = torch.randperm(sum(counts), generator=generator, device="cuda")
    table = int32(*[[1 << 30] * (max(counts) + 1)] * len(new))
    cache = normal(2, sum(counts), BLOCK, KV_HEADS, HEAD_DIM).fill_(torch.nan)
    contents = []
    for row, blocks in enumerate(order.split(counts)):
        table[row, : counts[row]] = blocks
        size = seq_lens[row] - starts[row]
        places = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()[:size]
        contents.append(normal(2, size, KV_HEADS, HEAD_DIM))
        cache.flatten(1, 2)[:, places] = contents[-1]
    query = normal(sum(new), 2 * KV_HEADS * group, HEAD_DIM)[:, : KV_HEADS * group]
    assert can_prefill_on_hopper(query, cache[0])
    starts_of = [0, *accumulate(new)]
    outs = []
    for at in (first, int32(first)):
        outs.append(torch.full_like(query, torch.nan, memory_format=torch.contiguous_format))
        attention_prefill_hopper(
            query, cache[0], cache[1], table, int32(*starts_of), int32(*starts), int32(*seq_lens),
            SCALE, window, first_sequence=at, out=outs[-1],
        )  # fmt: skip
    kept = slice(starts_of[first], None)
    assert torch.equal(outs[0][kept], outs[1][kept])
    assert bool(outs[0][: starts_of[first]].isnan().all())
    assert bool(outs[0][kept].isfinite().all())
    for row in range(first, len(new)):
        key, value = contents[row]
        for token in {0, new[row] // 3, new[row] // 2, new[row] - 1}:
            end = len(key) - new[row] + token + 1
            at = starts_of[row] + token
            exact, size = exact_row(query[at], key[:end], value[:end], SCALE, window)
            assert_within(outs[0][at], exact, 2.0**-7 * size)
