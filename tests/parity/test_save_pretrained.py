"""Checkpoints that transformers itself writes, towers included, generate the same tokens here."""

import json

import pytest
import torch
from safetensors import safe_open
from tests.ops.accuracy import seeded
from tests.parity.oracle import load_oracle
from transformers import MuseSparkForConditionalGeneration

from musespark import LLM, SamplingParams, load_decoder
from musespark.testing import make_checkpoint

PROMPT_LENS = [3, 21, 40]
NUM_TOKENS = 48


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def saved(request, tmp_path_factory):
    """transformers' model of one checkpoint, saved by itself in one file and in many."""
    root = tmp_path_factory.mktemp("saved")
    model = load_oracle(make_checkpoint(root / "made", dtype=request.param), request.param)
    assert isinstance(model, MuseSparkForConditionalGeneration)
    model.save_pretrained(root / "single")
    model.save_pretrained(root / "sharded", max_shard_size="100KB")
    return root


def keys(folder):
    names = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_generates_what_transformers_generates(saved, layout):
    folder = saved / layout
    assert any(name.startswith("model.vision_tower.") for name in keys(folder))
    assert any(name.startswith("model.audio_tower.") for name in keys(folder))
    assert len(list(folder.glob("*.safetensors"))) > 3 or layout == "single"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "muse_spark"
    prompts = [torch.randint(128, (n,), generator=seeded(n)).tolist() for n in PROMPT_LENS]
    llm = LLM(folder, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    oracle = load_oracle(folder, torch.float32)
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        out = oracle.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert completion.token_ids == out[0, len(prompt) :].tolist()
        assert completion.finish_reason == "length"


def test_a_model_that_transformers_initialized_itself(tmp_path):
    """No file of ours involved: config, weights and towers are transformers' own."""
    config = load_oracle(make_checkpoint(tmp_path / "made"), torch.float32).config
    torch.manual_seed(0)
    model = MuseSparkForConditionalGeneration(config).eval().float()
    model.save_pretrained(tmp_path / "own")
    prompt = torch.randint(128, (30,), generator=seeded()).tolist()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    actual = load_decoder(tmp_path / "own", dtype="float32").compute_logits(prompt)
    assert (actual - expected).abs().max() <= 1e-4 * expected.std()
