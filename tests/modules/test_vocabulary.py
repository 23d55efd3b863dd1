"""Both ends of the model, cut over the vocabulary."""

import pytest
import torch
from tests.ops.accuracy import BF16, F32, randn

from musespark.modules.vocabulary import VocabularyEmbedding, VocabularyHead
from musespark.parallel.mesh import MeshAxis

CPU = torch.device("cpu")
WIDTH = 8


def ranks(size):
    return [MeshAxis(rank, size) for rank in range(size)]


def load(module, table):
    (slot,) = module.weight_slots("end.", lambda _: True)
    assert (slot.name, slot.shape) == ("end.weight", tuple(table.shape))
    slot.store(table[slot.index])
    return module


@pytest.mark.parametrize("vocab_size", [12, 13, 15, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_each_row_is_found_on_one_rank(vocab_size, size, dtype):
    table = randn(vocab_size, WIDTH).to(dtype)
    ids = torch.arange(vocab_size).flip(0)
    total = torch.zeros(vocab_size, WIDTH, dtype=dtype)
    for axis in ranks(size):
        module = VocabularyEmbedding(vocab_size, WIDTH, axis=axis, dtype=dtype, device=CPU)
        total += load(module, table)(ids)
        assert module(ids[:0]).shape == (0, WIDTH)
    assert torch.equal(total, table[ids])


@pytest.mark.parametrize("vocab_size", [12, 13, 15, 16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_side_by_side_are_those_of_the_whole_vocabulary(vocab_size, size):
    table, x = randn(vocab_size, WIDTH, seed=1), randn(3, WIDTH)
    parts = []
    for axis in ranks(size):
        module = VocabularyHead(WIDTH, vocab_size, axis=axis, dtype=F32, device=CPU)
        parts.append(load(module, table)(x))
        assert parts[-1].shape == parts[0].shape
    logits = torch.cat(parts, dim=1)
    assert torch.allclose(logits[:, :vocab_size], x @ table.t(), atol=1e-5)
    assert logits[:, vocab_size:].count_nonzero() == 0
    whole = load(VocabularyHead(WIDTH, vocab_size, axis=ranks(1)[0], dtype=F32, device=CPU), table)
    assert whole.gather(whole(x)).shape == (3, vocab_size)
