"""Spark-Mini on a GPU as people use it: its widths are no multiples of what Hopper kernels take."""

import json

import httpx
import pytest
import torch
from tests.server.process import serving
from typer.testing import CliRunner

from musespark import LLM, SamplingParams
from musespark.cli.main import app
from musespark.llm.loading import load_decoder
from musespark.testing.checkpoints import make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ["spark-mini", "spark-mini-nvfp4"]


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("model", MODELS)
def test_generate_gives_the_cpus_tokens(model):
    arguments = (
        "generate", model, "--prompt", "1, 2, 3,", "--max-tokens", 40, "--ignore-eos", "--json",
        "--dtype", "float32",
    )  # fmt: skip
    on_gpu = run(*arguments, "--device", "cuda")
    assert on_gpu["token_ids"] == run(*arguments, "--device", "cpu")["token_ids"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_ask_the_host_for_nothing(model, dtype):
    """So that they run as CUDA graphs, whatever the widths."""
    decoder = load_decoder(model, device="cuda", dtype=dtype)
    decoder.pack()
    assert not decoder.waits_for_device


@pytest.mark.parametrize("model", MODELS)
def test_as_many_right_answers_in_bfloat16(model):
    """As in float32, whose tokens are the CPU's."""
    arguments = ("eval", model, "--samples", 48, "--tasks", "addition,json", "--json")
    narrow, exact = (
        run(*arguments, "--device", "cuda", "--dtype", dtype)["tasks"]
        for dtype in ("bfloat16", "float32")
    )
    for task, result in narrow.items():
        # A close call may go either way.
        assert result["accuracy"] == pytest.approx(exact[task]["accuracy"], abs=2.5 / 48), task


@pytest.mark.parametrize("model", MODELS)
def test_serves(model):
    pytest.importorskip("uvicorn")
    request = {"prompt": "1, 2, 3,", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with serving(model, "--device", "cuda", "--dtype", "float32") as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json={"model": model, **request}, timeout=60)
    assert answer.status_code == 200, answer.text
    llm = LLM(model, device="cpu", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert answer.json()["choices"][0]["text"] == llm.generate("1, 2, 3,", params)[0].text


@pytest.mark.parametrize("head_dim", [8, 48])
def test_heads_that_the_kernels_do_not_take(tmp_path, head_dim):
    folder = make_checkpoint(tmp_path / "model", head_dim=head_dim)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[1, 2, 3], list(range(4, 40))]
    found = [
        [list(c.token_ids) for c in LLM(folder, device=device, dtype="float32").generate(
            prompts, params
        )]
        for device in ("cuda", "cpu")
    ]  # fmt: skip
    assert found[0] == found[1]
