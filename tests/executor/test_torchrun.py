"""Under torchrun every process runs the same command, and one of them prints."""

import json
import subprocess
import sys

import pytest
from tests.server.live import PATIENCE

from musespark import LLM, SamplingParams
from musespark.config.environment import TorchrunPlace, torchrun_place
from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.executor.torchrun import join_torchrun

PROMPT = "What is 12 + 30?"


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, "-m", *launch, "-m", "musespark", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_one_process_prints_what_all_have_computed(axis):
    settings = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "256")
    result = torchrun(
        "generate", "--prompt", PROMPT, "--max-tokens", "12", "--json", *settings,
        f"--{axis}-parallel-size", "2",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("{")]
    with LLM("spark-mini", device="cpu", dtype="float32", max_model_len=256) as llm:
        (alone,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    assert json.loads(line)["token_ids"] == alone.token_ids


PLACE = TorchrunPlace(
    rank=0,
    world_size=2,
    local_rank=0,
    ranks_here=2,
    store_host="127.0.0.1",
    store_port=1,
    run_name="test",
)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "torchrun started 2 processes, but"),
        ({"tensor_parallel_size": 4}, "--nproc-per-node"),
        ({"data_parallel_size": 2}, "one torchrun per replica"),
    ],
)
def test_a_layout_for_other_processes_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        join_torchrun(Parallelism(**sizes), PLACE, "cpu")


def test_the_place_comes_from_the_environment(monkeypatch):
    assert torchrun_place() is None
    values = {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node",
        "MASTER_PORT": "99",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert torchrun_place() == TorchrunPlace(3, 4, 1, 2, "node", 99, "run-0")
