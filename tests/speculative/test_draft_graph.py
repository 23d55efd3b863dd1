"""What a draft does as graphs, with a stand-in that calls again what it recorded."""

import pytest
import torch

from musespark.llm.loading import load_draft
from musespark.model.draft import ContextRows, DraftContext, PagedContext
from musespark.model.kv_cache import KVCacheSpec
from musespark.speculative.draw import DrawSettings
from musespark.speculative.proposer import DraftProposer
from musespark.testing import make_draft, tiny_config

TARGET = tiny_config()
SPEC = KVCacheSpec(block_size=4, num_full_blocks=40, num_sliding_blocks=40)
N = 4


class CallsAgain:
    """A `Recorder` whose graphs fill the tensors of the first call, as a graph does."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, forward):
        self.num_recorded += 1
        result = forward()

        def replay():
            for mine, again in zip(result or (), forward() or (), strict=True):
                assert (mine is None) == (again is None)
                if mine is not None:
                    mine.copy_(again)

        return replay, result


@pytest.fixture(scope="module", params=[[3], [16], [8, 16]], ids=["sliding", "full", "both"])
def draft(request, tmp_path_factory):
    """Windows that page with the target's sliding layers, its full ones, and with both."""
    folder = make_draft(
        tmp_path_factory.mktemp("draft") / "draft",
        TARGET,
        global_attn_cfg=request.param,
        draft_vocab_size=TARGET.vocab_size // 2,
    )
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=generator)
    return load_draft(folder, TARGET, embedding, dtype=torch.float32)


def context_of(lengths, seed):
    """Sequences anywhere in the pools; sliding tables begin at the window."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    width = -(-max(*lengths, 1) // 4)
    lens = torch.tensor(lengths)
    first = (lens - TARGET.sliding_window + 1).clamp_min(0) // 4
    table = order[: len(lengths) * width].view(len(lengths), width)
    columns = first[:, None] + torch.arange(width)
    sliding = table.gather(1, columns.clamp_max(width - 1))[:, : TARGET.sliding_window // 4 + 2]
    return DraftContext(
        lens, PagedContext(table, torch.zeros_like(lens)), PagedContext(sliding, first * 4)
    )


def settings_of(count, kind, seed):
    if kind == "likely":
        return None
    generator = torch.Generator().manual_seed(seed)
    filtered = kind == "filtered"
    return DrawSettings(
        temperature=torch.tensor([0.0, 0.8, 1.3, 0.5, 1.0])[:count],
        top_k=torch.tensor([0, 5, 0, 0, 9])[:count] * filtered,
        top_p=torch.tensor([1.0, 0.9, 0.5, 1.0, 1.0])[:count] if filtered else torch.ones(count),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0])[:count] * filtered,
        uniform=torch.rand(count, N, generator=generator, dtype=torch.float64),
        has_filters=filtered,
    )


@pytest.mark.parametrize("kind", ["likely", "random", "filtered"])
def test_a_graph_guesses_what_the_draft_does(draft, kind):
    recorder = CallsAgain()
    plain = DraftProposer(draft, TARGET, SPEC)
    graphs = DraftProposer(draft, TARGET, SPEC, recorder=recorder)
    for one, other in zip(plain._caches, graphs._caches, strict=True):
        other.key.copy_(one.key.normal_())
        other.value.copy_(one.value.normal_())
    kept = []
    for seed, lengths in enumerate([[17, 3, 30], [9], [1, 0, 22, 35], [8, 8, 8]]):
        count = len(lengths)
        anchors = torch.arange(count) + seed
        context, settings = context_of(lengths, seed), settings_of(count, kind, seed)
        expected = plain.propose(anchors, context, N, settings)
        found = graphs.propose(anchors, context, N, settings)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert found.confidences is not None
        assert expected.confidences is not None
        assert torch.allclose(found.confidences, expected.confidences, atol=1e-5)
        if settings is None:
            assert found.distributions is None
        else:
            assert found.distributions is not None
            assert expected.distributions is not None
            random = settings.temperature > 0
            assert torch.allclose(
                found.distributions[random], expected.distributions[random], atol=1e-5
            )
            kept.append((found.distributions, found.distributions.clone()))
    # What was handed out does not change with the next guess.
    assert all(torch.equal(before, copy) for before, copy in kept)
    assert recorder.num_recorded == 2  # of four sequences, and of one


def test_a_graph_takes_in_what_the_draft_does(draft):
    recorder = CallsAgain()
    plain = DraftProposer(draft, TARGET, SPEC)
    graphs = DraftProposer(draft, TARGET, SPEC, recorder=recorder)
    caches = list(zip(plain._caches, graphs._caches, strict=True))
    for one, other in caches:
        for kind in ("key", "value"):
            getattr(other, kind).copy_(getattr(one, kind).normal_())
    width = 2 * TARGET.hidden_size
    for seed, count in enumerate([5, 1, 16, 17, 40, 140]):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(count, width, generator=generator)
        positions = torch.randint(500, (count,), generator=generator)
        full, sliding = (torch.randperm(160, generator=generator)[:count] for _ in range(2))
        before = [one.key.clone() for one, _ in caches]
        for proposer in (plain, graphs):
            proposer.inject(ContextRows(features, positions, full, sliding))
        for was, (one, other) in zip(before, caches, strict=True):
            assert torch.allclose(one.key, other.key, atol=1e-5)
            assert torch.allclose(one.value, other.value, atol=1e-5)
            assert int((was != other.key).flatten(2).any(-1).sum()) == count
    assert recorder.num_recorded == 4  # of 16, 32, 48 and 144


def test_what_is_drawn_is_in_the_targets_vocabulary_and_as_likely_as_said(draft):
    """Of many draws of the first token, as many as its distribution has it."""
    proposer = DraftProposer(draft, TARGET, SPEC)
    count = 4000
    uniform = torch.rand(count, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ones = torch.ones(count)
    settings = DrawSettings(
        ones, torch.zeros(count, dtype=torch.int64), ones, 0 * ones, uniform, False
    )
    lens = torch.zeros(count, dtype=torch.int64)
    paged = PagedContext(torch.zeros(count, 1, dtype=torch.int64), lens)
    guess = proposer.propose(lens + 3, DraftContext(lens, paged, paged), N, settings)
    assert guess.distributions is not None
    assert guess.distributions.shape == (count, N, TARGET.vocab_size)
    assert torch.allclose(guess.distributions.sum(-1), torch.ones(()), atol=1e-5)
    frequencies = guess.token_ids[:, 0].bincount(minlength=TARGET.vocab_size) / count
    assert float((frequencies - guess.distributions[0, 0]).abs().sum()) / 2 < 0.08
    drawn = guess.distributions.gather(2, guess.token_ids[..., None])
    assert bool((drawn > 0).all())
