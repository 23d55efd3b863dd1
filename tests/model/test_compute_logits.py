"""`compute_logits`, the door for tests and research: what it takes and what it refuses."""

import pytest
import torch

from musespark import load_decoder
from musespark.errors import RequestError
from musespark.testing import make_checkpoint


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return load_decoder(make_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32")


def test_lists_and_tensors_are_the_same(decoder):
    logits = decoder.compute_logits([1, 2, 3])
    assert logits.shape == (3, decoder.config.vocab_size)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, decoder.compute_logits(torch.tensor([1, 2, 3])))


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([[1, 2], [3, 4]], r"one sequence, \[T\], found \[2, 2\]"),
        ([5, -1], r"-1 is outside the vocabulary \(0 to 127\)"),
        ([5, 128], r"128 is outside the vocabulary \(0 to 127\)"),
    ],
)
def test_what_is_no_sequence_of_tokens_is_refused(decoder, token_ids, message):
    with pytest.raises(RequestError, match=message):
        decoder.compute_logits(token_ids)
