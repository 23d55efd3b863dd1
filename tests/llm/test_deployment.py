"""What cannot be spread is refused before a process starts or a weight is read."""

from pathlib import Path

import pytest
import torch

from musespark import LLM
from musespark.config.engine import EngineConfig
from musespark.errors import CheckpointError, ConfigError
from musespark.executor import multiprocess
from musespark.llm import deployment
from musespark.testing import make_checkpoint, tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose weights cannot be read."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, tiny_config())
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads cannot be cut into 3"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: must be 1 or more"),
        ({"pipeline_parallel_size": 7}, "7 stages for 6 layers"),
        ({"data_parallel_size": 2, "expert_parallel": True}, "moe_backend to all_to_all"),
        (
            {"tensor_parallel_size": 2, "expert_parallel": True, "moe_backend": "all_to_all"},
            "sequence_parallel",
        ),
        ({"sequence_parallel": True}, "sequence_parallel"),
        ({"hybrid_token_threshold": 8}, "hybrid_token_threshold"),
        ({"moe_backend": "w4a4"}, "musespark quantize"),
        ({"enable_lora": True}, "enable_lora"),
        ({"enable_eplb": True}, "enable_eplb"),
        ({"skip_final_all_reduce": True}, "skip_final_all_reduce"),
        ({"executor": "threads"}, "executor: must be one of multiprocess, ray"),
    ],
)
def test_bad_layouts_are_refused_first(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(folder, device="cpu", **settings)


def test_the_refusal_comes_before_any_process(folder, monkeypatch):
    def start(*_args):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocess.LocalLauncher, "_start", start)
    with pytest.raises(ConfigError, match="attention heads"):
        LLM(folder, device="cpu", tensor_parallel_size=3)
    with pytest.raises(CheckpointError):
        LLM(folder, device="cpu", tensor_parallel_size=2, draft="/no/such/draft")


def test_every_rank_needs_a_gpu_of_its_own(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EngineConfig(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="needs 2 GPUs, but 1 can be seen here"):
        deployment.check_deployment(folder, config, None)
    deployment.check_deployment(folder, config, "cpu")
    deployment.check_deployment(folder, EngineConfig(), "cuda")
    # A cluster has other machines' GPUs.
    ray = EngineConfig(tensor_parallel_size=2, executor="ray")
    deployment.check_deployment(folder, ray, "cuda")


def test_a_damaged_file_is_told_as_by_one_process(folder):
    with pytest.raises(CheckpointError, match=r"safetensors"):
        LLM(folder, device="cpu", tensor_parallel_size=2)


def test_invariance_is_refused_where_replicas_share_experts():
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(
            batch_invariant=True,
            data_parallel_size=2,
            expert_parallel=True,
            moe_backend="all_to_all",
            max_num_seqs=4,
        )


def test_a_replicas_queue_is_its_share_of_the_whole():
    config = EngineConfig(data_parallel_size=3, max_queue_len=10)
    build = deployment.part_builder("m", None, Path("m"), config, None, None)
    launcher = deployment.make_launcher(build, config, "cpu")
    assert isinstance(launcher, multiprocess.LocalLauncher)
    assert launcher._max_queue_len == 4
