"""Every way to spread the model gives what one process gives."""

from typing import Any

import pytest
import torch
from tests.parallel.replay import record, replay

from musespark import load_decoder
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.parallel import Parallelism
from musespark.testing import make_checkpoint

EXPERTS = {"expert_parallel": True}
TRAVEL = {**EXPERTS, "moe_backend": "all_to_all"}
CUT = {**TRAVEL, "sequence_parallel": True}


def tp(size: int) -> dict[str, Any]:
    return {"tensor_parallel_size": size}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": tp(2),
    "tp4": tp(4),
    "tp2-ep2": {**tp(2), **EXPERTS},
    "tp4-ep4": {**tp(4), **EXPERTS},
    "sp2": {**tp(2), **CUT},
    "sp4": {**tp(4), **CUT},
    "hybrid": {**tp(4), **CUT, "hybrid_token_threshold": 8},
    "pp2": {"pipeline_parallel_size": 2},
    "pp4": {"pipeline_parallel_size": 4},
    "pp2-tp2": {"pipeline_parallel_size": 2, **tp(2)},
    "pp2-tp2-ep2": {"pipeline_parallel_size": 2, **tp(2), **EXPERTS},
    "dp2": {"data_parallel_size": 2},
    "dp2-ep2": {"data_parallel_size": 2, **TRAVEL},
    "dp4-ep4": {"data_parallel_size": 4, **TRAVEL},
    "dp2-pp2-ep2": {"data_parallel_size": 2, "pipeline_parallel_size": 2, **TRAVEL},
    "dp2-sp2-ep4": {"data_parallel_size": 2, **tp(2), **CUT},
}

# Fewer tokens than ranks, as many, more, and many more; both sides of the hybrid's threshold.
LENGTHS = (1, 2, 3, 4, 5, 8, 9, 30)
PROMPTS = (11, 1, 5, 16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Dense and sparse layers; of the NVFP4 experts, the first and the last layer's stay wide."""
    folder = tmp_path_factory.mktemp("layouts")
    plain = make_checkpoint(
        folder / "plain",
        dtype=torch.float32,
        vocab_size=130,  # not a multiple of four
        num_attention_heads=8,
        moe_hidden_size=256,
        moe_intermediate_size=256,
        num_experts_per_tok=3,
        mlp_layer_types=["sparse", "sparse", "dense", "sparse", "sparse", "sparse"],
    )
    quantize_checkpoint(plain, folder / "nvfp4")
    return {"bf16": plain, "nvfp4": folder / "nvfp4"}


@pytest.fixture(scope="module")
def recordings(checkpoints):
    """Per checkpoint, what each of four replicas runs; the last one has next to nothing to do."""
    made = {}
    for name, folder in checkpoints.items():
        decoder = load_decoder(folder, dtype="float32")
        made[name] = [
            record(decoder, LENGTHS, prompts=PROMPTS),
            record(decoder, (7, 2), prompts=(3,)),
            record(decoder, (1, 12, 0, 2, 5), prompts=(9, 2)),
            record(decoder, (0, 1)),
        ]
    return made


@pytest.mark.parametrize("experts", ["bf16", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(workers, checkpoints, recordings, layout, experts):
    settings = LAYOUTS[layout]
    world = Parallelism(**settings).world_size
    replicas = recordings[experts][: settings.get("data_parallel_size", 1)]
    found = workers.run(world, replay, settings, str(checkpoints[experts]), replicas)
    answers = [answer for answer in found if answer is not None]
    assert len(answers) == world // settings.get("pipeline_parallel_size", 1)
    for logits_error, taps_error, flips, num_steps in answers:
        assert num_steps == len(recordings[experts][0].steps)
        assert flips == 0
        assert logits_error <= 1e-4
        assert taps_error <= 1e-4
