"""The draft against a float64 re-computation without a cache, for every variant of its config."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.model.draft_reference import ReferenceDraft, rms

from musespark.config.draft import DraftConfig
from musespark.llm.loading import load_draft
from musespark.model.draft import DraftContext, PagedContext
from musespark.model.draft_cache import allocate_draft_cache, draft_bytes_per_block, draft_kinds
from musespark.model.draft_layer import Boundary, DraftNorm
from musespark.model.kv_cache import KVCacheSpec
from musespark.testing import draft_fields, make_draft, tiny_config

TARGET = tiny_config()
BLOCK_SIZE, NUM_FULL, NUM_SLIDING = 4, 64, 70
SPEC = KVCacheSpec(BLOCK_SIZE, NUM_FULL, NUM_SLIDING)
LENGTHS = [37, 1, 12, 5, 0]

VARIANTS: dict[str, dict[str, Any]] = {
    "as released": {},
    "global": {"global_attn_cfg": None},
    "window 1": {"global_attn_cfg": [1]},
    "window 3": {"global_attn_cfg": [3]},
    "window beyond the context": {"global_attn_cfg": [1000]},
    "window of the target": {"global_attn_cfg": [8]},
    "cycle": {"num_hidden_layers": 5, "every_n_layers_nope": 3, "global_attn_cfg": [6, 3, 0]},
    "windows without a cycle": {"num_hidden_layers": 3, "global_attn_cfg": [6, 0]},
    "no rope": {"use_rope": False},
    "no rope by mode": {"use_rope": None, "draft_position_mode": "nope", "rope_theta": None},
    "rope by mode": {"use_rope": None, "draft_position_mode": "rope"},
    "temperature": {
        "num_hidden_layers": 3,
        "every_n_layers_nope": 2,
        "global_attn_cfg": [8, 0],
        "attn_temperature_tuning_floor_scale": 8,
        "attn_temperature_tuning_q_scale_constant": 0.3,
        "attn_temperature_tuning_layers": "global",
    },
    "plain qk scale": {"use_sqrt_attn_scaling": False},
    "no qk norm": {"use_qk_norm": False},
    "no output norm": {"use_attn_o_norm": False},
    "no output gate": {"use_attn_o_gate": False},
    "neither": {"use_attn_o_norm": False, "use_attn_o_gate": False},
    "no weights in norms": {"norm_affine": False, "use_ffn_learnable_scales": False},
    "weights after sub-layers": {"post_norm_affine": True, "use_ffn_learnable_scales": False},
    "weights after, first": {"post_norm_affine": True},
    "centre zero": {"post_norm_affine": True, "post_norm_gain_center_type": "zero"},
    "centre by index": {
        "post_norm_affine": True,
        "post_norm_gain_center_type": "inverse_residual_index",
        "output_norm_gain_center_type": "one",
    },
    "not centred": {"norm_zero_centered_gamma": False, "post_norm_affine": True},
    "post eps left out": {"rms_post_norm_eps": None, "rms_norm_eps": 0.03},
    "plain residual": {"use_residual_gate": False},
    "plain residual with weights": {"use_residual_gate": False, "post_norm_affine": True},
    "rounded residual": {"residual_dtype": "bf16"},
    "mup": {"metap": {"use_metap": True, "metap_mode": "mup", "base_width": 16}},
    "no metap": {"metap": {"use_metap": False, "base_width": 16}},
    "no cap": {"output_soft_cap_temp": None},
    "half the vocabulary": {"draft_vocab_size": 64},
    "no Markov head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "confidence without Markov": {"confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
    "masks only": {"sample_from_anchor": False},
    "sees its whole block": {"causal": False},
    "sees its whole block in a window": {"causal": False, "global_attn_cfg": [3]},
    "one tap of the embedding": {"target_layer_ids": [-1]},
    "four taps": {"target_layer_ids": [-1, 1, 2, 5]},
    "one key-value head": {"num_key_value_heads": 1, "head_dim": 64},
}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def embedding():
    return torch.randn(TARGET.vocab_size, TARGET.hidden_size, generator=seeded(1)).double()


class Pair:
    """A random draft, and its re-computation."""

    def __init__(self, folder, embedding, **overrides):
        fields = draft_fields(TARGET, **overrides)
        make_draft(folder, TARGET, dtype=torch.float32, **overrides)
        self.draft = load_draft(folder, TARGET, embedding, dtype=torch.float64)
        tensors = load_file(folder / "model.safetensors")
        self.reference = ReferenceDraft(fields, tensors, embedding)
        count = len(fields["target_layer_ids"])
        self.taps = [
            [
                torch.randn(n, TARGET.hidden_size, generator=seeded(n + i)).double()
                for i in range(count)
            ]
            for n in LENGTHS
        ]


@pytest.fixture(scope="module", params=list(VARIANTS.items()), ids=list(VARIANTS))
def pair(request, tmp_path_factory, embedding):
    _, overrides = request.param
    return Pair(tmp_path_factory.mktemp("draft") / "d", embedding, **overrides)


def new_caches(draft):
    """Full of numbers that no draft would write."""
    caches = allocate_draft_cache(
        draft.config, TARGET, SPEC, dtype=draft.dtype, device=draft.device
    )
    for cache in caches:
        cache.key.uniform_(-50, 50, generator=seeded(3))
        cache.value.uniform_(-50, 50, generator=seeded(4))
    return caches


def tables(seed):
    """Shuffled blocks of all sequences, as wide as the longest needs and two more."""
    width = -(-max(LENGTHS) // BLOCK_SIZE) + 2
    order = torch.randperm(NUM_FULL, generator=seeded(seed))
    return order[: len(LENGTHS) * width].view(len(LENGTHS), width)


FULL, SLIDING = tables(5), tables(6)


def slots(table, positions):
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


def inject(draft, taps, caches, chunk):
    for row, (streams, length) in enumerate(zip(taps, LENGTHS, strict=True)):
        for start in range(0, length, chunk):
            positions = torch.arange(start, min(start + chunk, length))
            full, sliding = slots(FULL[row], positions), slots(SLIDING[row], positions)
            features = draft.features([s[positions] for s in streams])
            draft.inject(features, positions, full, sliding, caches)


def context_of(rows=slice(None), first_block=0, late=0):
    lens = torch.tensor(LENGTHS)[rows] + late
    return DraftContext(
        context_lens=lens,
        full=PagedContext(FULL[rows], torch.zeros_like(lens)),
        sliding=PagedContext(
            SLIDING[rows, first_block:], torch.full_like(lens, first_block * BLOCK_SIZE)
        ),
    )


ANCHORS = torch.tensor([17, 3, 99, 0, 64])


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_batch_proposes_what_each_sequence_does_alone_without_a_cache(pair, num_tokens):
    draft, caches = pair.draft, new_caches(pair.draft)
    inject(draft, pair.taps, caches, chunk=1000)
    before = [(cache.key.clone(), cache.value.clone()) for cache in caches]
    proposal = draft.propose(ANCHORS, context_of(), caches, num_tokens)
    assert proposal.token_ids.shape == (len(LENGTHS), num_tokens)
    for row, (anchor, taps) in enumerate(zip(ANCHORS.tolist(), pair.taps, strict=True)):
        expected = pair.reference.propose(anchor, taps, num_tokens)
        assert (proposal.logits[row] - expected.logits).abs().max() < 1e-9
        assert proposal.token_ids[row].tolist() == expected.token_ids
        assert (proposal.confidences[row] - expected.confidences).abs().max() < 1e-9
    for cache, (key, value) in zip(caches, before, strict=True):
        assert torch.equal(cache.key, key)
        assert torch.equal(cache.value, value)


@pytest.fixture(scope="module")
def released(tmp_path_factory, embedding):
    return Pair(tmp_path_factory.mktemp("draft") / "d", embedding)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_context_in_chunks_is_context_at_once(released, chunk):
    draft, whole, parts = released.draft, *(new_caches(released.draft) for _ in range(2))
    inject(draft, released.taps, whole, chunk=1000)
    inject(draft, released.taps, parts, chunk=chunk)
    for one, other in zip(whole, parts, strict=True):
        assert (one.key - other.key).abs().max() < 1e-12
        assert (one.value - other.value).abs().max() < 1e-12


def test_a_table_may_begin_where_the_window_does(tmp_path, embedding):
    pair = Pair(tmp_path / "d", embedding, global_attn_cfg=[8])
    caches = new_caches(pair.draft)
    inject(pair.draft, pair.taps, caches, chunk=1000)
    whole = pair.draft.propose(ANCHORS, context_of(), caches, 5)
    later = pair.draft.propose(ANCHORS[:1], context_of(slice(1), first_block=7), caches, 5)
    assert (whole.logits[:1] - later.logits).abs().max() < 1e-12


def test_another_position_is_another_proposal(released):
    """One position early or late would show at short and at long context."""
    caches = new_caches(released.draft)
    inject(released.draft, released.taps, caches, chunk=1000)
    right = released.draft.propose(ANCHORS, context_of(), caches, 3).logits
    wrong = released.draft.propose(ANCHORS, context_of(late=1), caches, 3).logits
    assert ((right - wrong).abs().amax(dim=(1, 2)) > 1e-3).all()


def test_a_pick_decides_what_follows(released):
    caches = new_caches(released.draft)
    inject(released.draft, released.taps, caches, chunk=1000)
    seen = []

    def pick(place, logits):
        seen.append((place, logits.clone()))
        return logits.argmin(dim=-1)

    proposal = released.draft.propose(ANCHORS, context_of(), caches, 3, pick)
    greedy = released.draft.propose(ANCHORS, context_of(), caches, 3)
    assert [place for place, _ in seen] == [0, 1, 2]
    for place, logits in seen:
        assert torch.equal(proposal.logits[:, place], logits)
        assert torch.equal(proposal.token_ids[:, place], logits.argmin(dim=-1))
    assert torch.equal(proposal.logits[:, 0], greedy.logits[:, 0])
    assert (proposal.logits[:, 1] - greedy.logits[:, 1]).abs().min() < 20
    assert not torch.allclose(proposal.logits[:, 1], greedy.logits[:, 1])


def test_a_reduced_vocabulary_expands_to_the_targets(tmp_path, embedding):
    draft = Pair(tmp_path / "d", embedding, draft_vocab_size=32).draft
    values = torch.arange(64.0).view(2, 32)
    expanded = draft.expand(values, -torch.inf)
    assert expanded.shape == (2, 128)
    assert torch.equal(expanded[:, ::4], values)
    assert torch.isinf(expanded).sum() == 2 * 96


@pytest.mark.parametrize("packed", [False, True])
def test_bfloat16_stays_near(tmp_path, embedding, packed):
    pair = Pair(tmp_path / "d", embedding)
    draft = load_draft(tmp_path / "d", TARGET, embedding.bfloat16(), dtype=torch.bfloat16)
    if packed:
        draft.pack()
    logits = []
    for model in (pair.draft, draft):
        caches = new_caches(model)
        inject(model, pair.taps, caches, chunk=1000)
        logits.append(model.propose(ANCHORS, context_of(), caches, 1).logits.double())
    exact, rounded = logits
    assert draft.propose(ANCHORS, context_of(), caches, 2).logits.dtype == torch.float32
    assert (exact - rounded).abs().mean() < 0.1 * exact.std()


def test_layers_page_with_those_of_the_target_that_keep_as_much(tmp_path, embedding):
    """The target's window is 8."""
    draft = Pair(tmp_path / "d", embedding, num_hidden_layers=4, global_attn_cfg=[8, 9, 0, 2]).draft
    caches = new_caches(draft)
    blocks = [len(cache.key) for cache in caches]
    assert blocks == [NUM_SLIDING, NUM_FULL, NUM_FULL, NUM_SLIDING]
    held = sum(part.numel() * 8 for cache in caches for part in (cache.key, cache.value))
    full, sliding = (
        draft_bytes_per_block(draft.config, TARGET, kind, BLOCK_SIZE, torch.float64)
        for kind in ("full_attention", "sliding_attention")
    )
    assert held == NUM_FULL * full + NUM_SLIDING * sliding


def test_where_the_target_slides_nowhere_all_pages_are_full():
    target = tiny_config(layer_types="full")
    draft = DraftConfig.from_dict(draft_fields(target, global_attn_cfg=[2]))
    assert draft_kinds(draft, target) == ["full_attention"] * 2


@pytest.mark.parametrize(("kept", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_stream_is_rounded_where_the_config_says_so(kept, dtype):
    """To the compute dtype, and its norm is taken of what is left."""
    config = DraftConfig.from_dict(draft_fields(TARGET, residual_dtype=kept))
    made: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    boundary = Boundary(config, residual_index=1, affine=False, **made)
    norm = DraftNorm(TARGET.hidden_size, 1e-5, centre=1.0, **made)
    boundary.gate.copy_(torch.randn(TARGET.hidden_size, generator=seeded(0)))
    norm.weight.copy_(torch.randn(TARGET.hidden_size, generator=seeded(1)))
    boundary.finish_loading()
    norm.finish_loading()
    stream = torch.randn(9, TARGET.hidden_size, generator=seeded(2)).to(dtype)
    branch = torch.randn(9, TARGET.hidden_size, generator=seeded(3)).bfloat16()
    normed, after = boundary(stream, branch, norm)
    assert (normed.dtype, after.dtype) == (torch.bfloat16, dtype)
    exact = boundary.alpha.double() * stream.double() + boundary.beta.double() * rms(
        branch.double(), config.rms_post_norm_eps
    )
    rounding = 2**-8 if kept == "bf16" else 0
    assert ((after - exact).abs() <= rounding * exact.abs() + 1e-6).all()
    expected = rms(after.double(), 1e-5) * (1 + norm.weight.double())
    assert ((normed - expected).abs() <= 2**-8 * expected.abs() + 1e-12).all()
