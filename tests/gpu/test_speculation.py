"""Guessing ahead on a GPU: the same tokens as without, through graphs."""

import dataclasses

import pytest
import torch

from musespark import LLM, SamplingParams
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.model import DecoderConfig
from musespark.testing import make_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [
    list(text.encode())
    for text in ("What is 12 + 30?", "Hello", "Sort these numbers: 5, 3, 9, 1. " * 8, "b" * 150)
]
GREEDY = SamplingParams(temperature=0, max_tokens=48)
PARAMS = [
    GREEDY,
    dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9, seed=3, n=2),
    dataclasses.replace(GREEDY, repetition_penalty=1.3, logprobs=1),
]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    target = DecoderConfig.from_folder(resolve_checkpoint("spark-mini"))
    folder = tmp_path_factory.mktemp("draft") / "draft"
    return make_draft(folder, target, target_layer_ids=[1, 5], block_size=5)


def tokens(params, dtype, **settings):
    llm = LLM("spark-mini", device="cuda", dtype=dtype, max_num_seqs=8, **settings)
    results = [[c.token_ids for c in llm.generate(PROMPTS, each)] for each in params]
    return results, llm.stats().speculation


@pytest.mark.parametrize("width", [None, 1, 5])
def test_float32_tokens_are_the_same_with_a_draft(draft, tmp_path, monkeypatch, width):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected, _ = tokens(PARAMS, "float32")
    found, stats = tokens(PARAMS, "float32", draft=str(draft), num_speculative_tokens=width)
    assert found == expected
    assert stats is not None
    assert stats.cycles > 0 or width is None


def test_bfloat16_runs_through_graphs_and_repeats_itself(draft, tmp_path, monkeypatch):
    """Shapes differ with a draft, so bits do; but a run equals the next."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sampled = dataclasses.replace(GREEDY, temperature=1.0, ignore_eos=True)
    settings = {"draft": str(draft), "num_speculative_tokens": 5}
    one, stats = tokens([GREEDY], "bfloat16", **settings)
    assert stats is not None
    assert stats.cycles > 0
    assert tokens([GREEDY], "bfloat16", **settings)[0] == one
    found, _ = tokens([sampled], "bfloat16", **settings)
    assert all(len(ids) == 48 for ids in found[0])
