"""In float32, this decoder and transformers' compute the same thing, to rounding."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from tests.engine.harness import cached_logits, generate
from tests.ops.accuracy import seeded
from tests.parity.oracle import CASES, Case, load_oracle, oracle_greedy, oracle_logits

from musespark import load_decoder
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.moe.router import Router
from musespark.ops import small_experts

NUM_TOKENS = 64
PROMPT_LEN = 29
"""Beyond the windows of 8 and 3, and no multiple of the block size or the chunk."""


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(128, (count,), generator=seeded(seed)).tolist()


@pytest.fixture(scope="module", autouse=True)
def large_experts():
    """Let tiny experts take the path of large ones; tests/moe compares the paths."""
    with mock.patch.object(small_experts, "_MAX_EXPERT_BYTES", 0):
        yield


@dataclass
class Pair:
    """One checkpoint through both."""

    decoder: Decoder
    oracle: torch.nn.Module


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def pair(request, tmp_path_factory):
    folder = request.param.write(tmp_path_factory.mktemp("parity") / "model", torch.float32)
    return Pair(load_decoder(folder, dtype="float32"), load_oracle(folder, torch.float32))


@pytest.mark.parametrize("length", [1, 2, 61])
def test_logits_agree(pair, length):
    tokens = random_tokens(length, seed=length)
    theirs = oracle_logits(pair.oracle, tokens)
    ours = pair.decoder.compute_logits(tokens)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.std()


def test_the_streams_behind_layers_agree(pair):
    tokens = torch.tensor(random_tokens(37, seed=4))
    with torch.inference_mode():
        out = pair.oracle(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
    # transformers lists the embedding first, and norms the last layer's output.
    theirs = [states[0] for states in out.hidden_states[:-1]]
    taps = tuple(range(-1, len(theirs) - 1))
    _, ours = pair.decoder.forward_with_taps(ForwardBatch.uncached(tokens), None, taps)
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine - its).abs().max() <= 1e-4 * its.std()


def test_greedy_tokens_agree_through_the_paged_cache(pair):
    prompt = random_tokens(PROMPT_LEN, seed=6)
    theirs = oracle_greedy(pair.oracle, prompt, NUM_TOKENS)
    # Seven tokens at a time: five chunks, which begin and end inside blocks of four.
    tokens, cached = cached_logits(
        pair.decoder, prompt + [0] * NUM_TOKENS, prompt_len=PROMPT_LEN, chunk=7, stale=50.0
    )
    decided = theirs.num_decided
    assert decided >= NUM_TOKENS // 2, "transformers' margins are too small to compare"
    assert tokens[PROMPT_LEN:][:decided] == theirs.token_ids[:decided]
    # Every position's logits, prefill and decode alike, against one pass without a cache.
    uncached = pair.decoder.compute_logits(tokens[:-1])
    assert (cached - uncached).abs().max() <= 1e-4 * uncached.std()


NEIGHBOURS: dict[str, list[dict[str, Any]]] = {
    "default pattern": [
        {"sliding_window": 9},
        {"qk_scale_factor": 5.474},
        {"layer_rope_theta": [501_000.0, 0.0, *[501_000.0] * 3, 0.0]},
        {"residual_gate_temperature": 0.3003},
        {"final_logit_softcapping": 20.01},
        {"num_experts_per_tok": 3},
    ],
    "small activations": [
        {"rms_norm_eps": 1.01e-5},
        {"post_norm_eps": 1.01e-8},
        {"routed_scaling_factor": 1.1},
    ],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name in NEIGHBOURS for change in NEIGHBOURS[name]]
)
def test_a_wrong_model_would_be_noticed(name, change, tmp_path):
    """The bound is tight enough to tell a model from its neighbours."""
    tokens = random_tokens(61, seed=61)
    case = next(case for case in CASES if case.name == name)
    right = load_decoder(case.write(tmp_path / "right", torch.float32), dtype="float32")
    wrong = Case("", case.overrides | change).write(tmp_path / "wrong", torch.float32)
    weights = (tmp_path / "right" / "model.safetensors").read_bytes()
    (wrong / "model.safetensors").write_bytes(weights)
    expected = right.compute_logits(tokens)
    difference = load_decoder(wrong, dtype="float32").compute_logits(tokens) - expected
    assert difference.abs().max() > 1e-4 * expected.std()


def test_the_strong_bias_changes_the_selection(tmp_path):
    case = next(case for case in CASES if case.name == "bias decides")
    decoder = load_decoder(case.write(tmp_path / "model", torch.float32), dtype="float32")
    hidden = torch.randn(64, 64, generator=seeded())
    routers = [module for module in decoder.modules() if isinstance(module, Router)]
    assert len(routers) == 6
    for router in routers:
        chosen = router(hidden).ids.sort(dim=1).values
        router.e_score_correction_bias.data.zero_()
        differs = (chosen != router(hidden).ids.sort(dim=1).values).any(dim=1)
        assert differs.float().mean() > 0.5


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_batch_of_mixed_lengths_agrees_with_transformers_one_by_one(tmp_path, chunk):
    """Some decode while others are still read in chunks; each gets the tokens it gets alone."""
    folder = Case("", {"sliding_window": 5}).write(tmp_path / "model", torch.float32)
    decoder, oracle = load_decoder(folder, dtype="float32"), load_oracle(folder, torch.float32)
    prompts = [random_tokens(length, seed=length) for length in (1, 40, 4, 17, 5)]
    together = generate(
        decoder,
        prompts,
        max_num_seqs=5,
        max_num_batched_tokens=max(5, chunk * 5),
        stale=50.0,
    )
    for prompt, tokens in zip(prompts, together, strict=True):
        theirs = oracle_greedy(oracle, prompt, NUM_TOKENS)
        assert theirs.num_decided >= NUM_TOKENS // 2
        assert tokens[: theirs.num_decided] == theirs.token_ids[: theirs.num_decided]
