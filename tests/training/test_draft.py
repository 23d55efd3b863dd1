"""The draft in training computes what the engine computes from its export."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from training.config import SPARK_MINI
from training.draft import Read, Trainer
from training.draft_config import DRAFT_RECIPE, SPARK_MINI_DRAFT
from training.draft_data import continued, made
from training.draft_export import export_draft
from training.draft_model import Blocks, Draft, DraftOutput

from musespark.config.draft import DraftConfig
from musespark.llm.loading import load_draft
from musespark.model.draft import DraftContext, PagedContext
from musespark.model.draft_cache import allocate_draft_cache
from musespark.model.kv_cache import KVCacheSpec
from musespark.testing.configs import tiny_config
from training import draft_evaluation, draft_install

TARGET = tiny_config(
    vocab_size=SPARK_MINI.vocab_size, hidden_size=SPARK_MINI.hidden_size, num_hidden_layers=8
)
LENGTH = 160


@pytest.fixture(scope="module")
def draft():
    torch.manual_seed(0)
    size = (SPARK_MINI.vocab_size, SPARK_MINI.hidden_size)
    draft = Draft(SPARK_MINI_DRAFT, DRAFT_RECIPE, 0.1 * torch.randn(size), 0.02 * torch.randn(size))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name or name.endswith((".gate", "w2.weight", "proj.bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
        draft.confidence_head.proj.weight.normal_(std=0.05)
        # What the file holds.
        for name, parameter in draft.named_parameters():
            if not name.endswith(".gate"):
                parameter.copy_(parameter.bfloat16())
    return draft


def test_every_block_proposes_what_the_engine_proposes(draft, tmp_path):
    export_draft(draft, tmp_path / "draft")
    engine = load_draft(tmp_path / "draft", TARGET, draft.embedding, dtype=torch.float32)
    ids = torch.randint(250, (2, LENGTH + 8))
    taps = torch.randn(2, LENGTH, 4 * SPARK_MINI.hidden_size)
    anchors = torch.tensor([[1, 70, LENGTH - 1], [0, 33, 101]])
    size = SPARK_MINI_DRAFT.block_size
    row = torch.arange(2)[:, None, None]
    tokens = ids[row, anchors[:, :, None] + torch.arange(size)]
    with torch.no_grad():
        trained = draft(taps, Blocks(anchors, tokens))
    for number, place in product(range(2), range(3)):
        length = int(anchors[number, place])
        spec = KVCacheSpec(16, 16, 16)
        caches = allocate_draft_cache(
            engine.config, TARGET, spec, dtype=torch.float32, device=engine.device
        )
        positions = torch.arange(length)
        streams = taps[number, :length].split(SPARK_MINI.hidden_size, dim=-1)
        engine.inject(engine.features(streams), positions, positions, None, caches)
        paged = PagedContext(torch.arange(16)[None], torch.tensor([0]))
        context = DraftContext(torch.tensor([length]), full=paged, sliding=None)
        following = tokens[number, place, 1:].tolist()

        def pick(place, _logits, following=following):
            return torch.tensor(following[place : place + 1] or [0])

        anchor = tokens[number, place, :1]
        proposal = engine.propose(anchor, context, caches, size, pick)
        assert (proposal.logits[0] - trained.logits[number, place]).abs().max() < 1e-3
        confidence = trained.confidence[number, place].sigmoid()
        assert (proposal.confidences[0] - confidence).abs().max() < 1e-4


def test_the_export_states_what_the_trained_draft_is(draft, tmp_path):
    export_draft(draft, tmp_path)
    config = DraftConfig.from_folder(tmp_path)
    shape = SPARK_MINI_DRAFT
    assert config.attention_scale == pytest.approx(shape.qk_scale * shape.head_dim**-0.5)
    assert config.output_multiplier == shape.output_multiplier
    assert {layer.sliding_window for layer in config.layers} == {shape.window}
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size <= 4 * 2**20


@pytest.fixture(scope="module")
def trainer():
    size = (SPARK_MINI.vocab_size, SPARK_MINI.hidden_size)
    target = mock.Mock(embedding=0.1 * torch.randn(size), lm_head=0.02 * torch.randn(size))
    return Trainer(replace(DRAFT_RECIPE, anchors=40), target, torch.device("cpu"))


def test_blocks_begin_where_the_assistant_goes_on(trainer):
    ids = torch.arange(40)[None]
    trained = torch.zeros(1, 40, dtype=torch.bool)
    trained[0, 10:16] = trained[0, 39] = True
    blocks, wanted = trainer._draw_blocks(ids, trained)
    assert set(blocks.anchors.flatten().tolist()) == {10, 11, 12, 13, 14}
    for anchor, tokens, places in zip(
        blocks.anchors[0].tolist(), blocks.tokens[0].tolist(), wanted[0].tolist(), strict=True
    ):
        assert tokens == list(range(anchor, anchor + 7))
        assert places == [float(anchor + 1 + place <= 15) for place in range(7)]


def test_a_draft_that_says_what_the_target_says_loses_nothing(trainer):
    logits = torch.randn(1, 3, 7, 384)
    perfect = DraftOutput(logits, torch.full((1, 3, 7), 20.0))
    judged = trainer._losses(perfect, logits, torch.ones(1, 3, 7))
    assert judged.total_variation < 1e-5
    assert judged.confidence < 1e-5
    assert judged.tokens_per_cycle == 6
    wrong = DraftOutput(-logits, torch.full((1, 3, 7), 20.0))
    judged = trainer._losses(wrong, logits, torch.ones(1, 3, 7))
    assert judged.total_variation > 0.5
    assert judged.confidence > 5
    assert judged.tokens_per_cycle == 1


def test_training_lowers_the_loss(trainer):
    ids = torch.randint(250, (2, 48))
    read = Read(
        ids,
        torch.ones(2, 48, dtype=torch.bool),
        20 * torch.nn.functional.one_hot(ids.roll(-1, 1), 384).float(),
        torch.randn(2, 48, 4 * 256).bfloat16(),
    )
    losses = [trainer.train_step(read).cross_entropy.item() for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]


def test_own_conversations_are_prompts_and_what_was_made_of_them():
    recipe = replace(DRAFT_RECIPE, own_tokens=20)
    asked = []

    def echo(prompts, max_tokens):
        assert max_tokens == 20
        asked.extend(prompts)
        return [[*prompt[:5], 259] for prompt in prompts]

    own = continued(echo, recipe, "test", 10)
    assert len(own) == len(asked) >= 8
    for conversation, prompt in zip(own, asked, strict=True):
        assert conversation.ids.tolist() == [*prompt, *prompt[:5], 259]
        assert conversation.trained.tolist() == [False] * len(prompt) + [True] * 6


def test_chunks_are_the_same_whenever_they_are_made():
    recipe = replace(DRAFT_RECIPE, chunk=3)
    first, again, other = made(recipe, 0), made(recipe, 0), made(recipe, 1)
    assert len(first) == 3
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0].ids, other[0].ids)


def test_cycles_are_counted_as_an_engine_goes_through_them(monkeypatch):
    """The reply is 10 11 ... 16; 0 is a wrong guess."""
    prompt, reply = [1, 2, 3], list(range(10, 17))
    proposals = [
        [11, 12, 0],  # two accepted and 13 of the target's own
        None,
        None,
        [0, 15, 16],  # none accepted: 14
        [15, 16, 17],  # two accepted; the reply ends there
        None,
        None,
    ]
    monkeypatch.setattr(draft_evaluation, "_propose_everywhere", lambda *_: proposals)
    found = draft_evaluation.count_cycles(mock.Mock(), mock.Mock(), prompt, reply, 3)
    assert found == draft_evaluation.Cycles(6, 3, accepted=(2, 2, 0), offered=(3, 3, 2))
    assert (found + found).tokens_per_cycle == 2


def test_the_card_has_every_task_and_their_mean():
    table = draft_install.cycle_table({"addition": 2.0, "talk": 4.0})
    assert "| addition | 2.00 |" in table
    assert "| **mean** | **3.00** |" in table
