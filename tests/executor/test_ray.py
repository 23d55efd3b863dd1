"""Two nodes of a Ray cluster serve a request, until an actor is killed."""

import json
import subprocess
import sys

import httpx
import psutil
import pytest
from tests.server.live import PATIENCE, eventually
from tests.server.process import serving

from musespark import LLM, SamplingParams
from musespark.errors import ConfigError

BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "512")


@pytest.mark.slow
def test_without_a_cluster_one_is_started_and_ends_with_the_command():
    pytest.importorskip("ray")
    arguments = ("--executor", "ray", "--tensor-parallel-size", "2", *SETTINGS)
    result = subprocess.run(
        [sys.executable, "-m", "musespark", "generate", "--prompt", "What is 12 + 30?",
         "--max-tokens", "8", "--num-threads", "2", "--json", *arguments],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    with LLM("spark-mini", device="cpu", dtype="float32", max_model_len=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        (alone,) = llm.generate("What is 12 + 30?", params)
    assert json.loads(result.stdout)["token_ids"] == alone.token_ids


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with one CPU slot each, so that two ranks are on different ones."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_two_nodes_serves_until_an_actor_is_killed(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    arguments = ("--executor", "ray", "--tensor-parallel-size", "2", *SETTINGS)
    with (
        serving(*arguments, exit_code=1) as (_, url),
        httpx.Client(base_url=url, timeout=PATIENCE) as client,
    ):
        answer = client.post("/v1/chat/completions", json=BODY).json()
        assert answer["choices"][0]["message"]["content"].strip() == "42"
        actors = _actors()
        assert len({actor.parent() for actor in actors}) == 2, "both on one node"
        endless = {**BODY, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/chat/completions", json=endless) as response:
            lines = response.iter_lines()
            next(lines)
            actors[0].kill()
            rest = list(lines)
        (error,) = [line for line in rest if '"engine_dead"' in line]
        assert "has ended: The actor died" in error
        assert eventually(lambda: not _actors())
        assert client.post("/v1/chat/completions", json=BODY).status_code == 503

    with pytest.raises(ConfigError, match="tp4 needs 4 CPUs, but the Ray cluster has 2"):
        LLM("spark-mini", tensor_parallel_size=4, executor="ray", device="cpu")


def _actors() -> list[psutil.Process]:
    """The ranks, among what this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("RankActor" in word for word in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
