"""A token further back than the window changes full layers' output and never a sliding layer's.

One layer, so that nothing can reach further than its own window; through the paged cache, in
chunks, across block boundaries, and where blocks behind the window have been given back.
"""

import pytest
import torch
from tests.engine.harness import cached_logits

from musespark import load_decoder
from musespark.testing import make_checkpoint

WINDOW, LENGTH, CHANGED = 6, 40, 9


def logits_of(folder, changed_token, *, chunk, block_size):
    """Logits [LENGTH, V] at every position, with one token changed, cached and uncached."""
    decoder = load_decoder(folder, dtype="float64")
    tokens = torch.randint(1, 128, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))
    tokens[CHANGED] = changed_token
    _, cached = cached_logits(
        decoder,
        tokens.tolist(),
        prompt_len=LENGTH,
        chunk=chunk,
        block_size=block_size,
        stale=100.0,
    )
    uncached = decoder.compute_logits(tokens[:LENGTH])
    assert torch.allclose(cached, uncached, rtol=0, atol=1e-10)
    return cached


@pytest.fixture(scope="module", params=["full", "sliding"])
def kind_and_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("window") / request.param
    overrides = {"num_hidden_layers": 1, "layer_types": request.param, "sliding_window": WINDOW}
    return request.param, make_checkpoint(folder, dtype=torch.float32, **overrides)


@pytest.mark.parametrize("block_size", [1, 4, 6, 16])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_visible_exactly_as_far_as_the_layer_sees(kind_and_folder, chunk, block_size):
    kind, folder = kind_and_folder
    before = logits_of(folder, 3, chunk=chunk, block_size=block_size)
    after = logits_of(folder, 77, chunk=chunk, block_size=block_size)
    changed = ((after - before).abs() > 1e-9).any(dim=1)
    last_seen = CHANGED + WINDOW if kind == "sliding" else LENGTH
    expected = [CHANGED <= position < last_seen for position in range(LENGTH)]
    assert changed.tolist() == expected
    # What cannot see the token is not off by rounding either.
    assert torch.equal(after[:CHANGED], before[:CHANGED]) or chunk != 1
    if kind == "sliding" and chunk == 1:
        assert torch.equal(after[last_seen:], before[last_seen:])


def test_layers_of_both_kinds_side_by_side(tmp_path):
    """Two sliding layers reach twice as far back, and a full one sees everything."""
    for kinds, reach in ((["sliding", "sliding"], 2 * WINDOW - 1), (["sliding", "full"], LENGTH)):
        folder = make_checkpoint(
            tmp_path / "-".join(kinds),
            dtype=torch.float32,
            num_hidden_layers=2,
            layer_types=kinds,
            sliding_window=WINDOW,
        )
        before = logits_of(folder, 3, chunk=5, block_size=4)
        after = logits_of(folder, 77, chunk=5, block_size=4)
        changed = ((after - before).abs() > 1e-9).any(dim=1).nonzero().flatten()
        assert changed.min() == CHANGED
        assert changed.max() == min(LENGTH, CHANGED + reach) - 1
