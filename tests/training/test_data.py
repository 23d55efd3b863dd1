"""Rows of packed conversations."""

from dataclasses import replace

import numpy as np
import pytest
from training.config import RECIPE
from training.data import Packer, make_chunk
from training.tokenizer import build

SMALL = replace(RECIPE, rows=3, steps_per_chunk=2)


@pytest.fixture(scope="module")
def chunk():
    return make_chunk(SMALL, 5)


def test_a_chunk_is_the_same_whenever_it_is_made(chunk):
    again = make_chunk(SMALL, 5)
    other = make_chunk(SMALL, 6)
    assert np.array_equal(chunk.ids, again.ids)
    assert not np.array_equal(chunk.ids, other.ids)


def test_rows_are_well_filled_with_whole_conversations(chunk):
    assert chunk.ids.shape == (6, SMALL.row_tokens)
    assert (chunk.document > 0).mean() > 0.85
    tokenizer = build()
    begin, end = tokenizer.token_to_id("<|begin_of_text|>"), tokenizer.token_to_id("<|eot|>")
    for ids, document in zip(chunk.ids, chunk.document, strict=True):
        for number in range(1, document.max() + 1):
            conversation = ids[document == number]
            assert conversation[0] == begin
            assert conversation[-1] == end
            assert (conversation == begin).sum() == 1


def test_only_the_assistants_last_words_are_trained(chunk):
    tokenizer = build()
    assert 0.2 < chunk.trained.mean() < 0.7
    assert not chunk.trained[chunk.document == 0].any()
    for ids, trained, document in zip(chunk.ids, chunk.trained, chunk.document, strict=True):
        first = ids[(document == 1) & trained]
        text = tokenizer.decode(first.tolist(), skip_special_tokens=False)
        assert text.startswith(" to=")
        assert text.endswith("<|eot|>")


def test_too_long_conversations_are_left_out():
    assert Packer("short", 256).rows(4).ids.shape == (4, 256)
