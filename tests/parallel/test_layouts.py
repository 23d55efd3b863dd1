"""Every way to spread the model gives what one process gives."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.replay import record, replay

from musespark import load_decoder
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.parallel import Parallelism
from musespark.model.batch import ForwardBatch
from musespark.model.decoder import Decoder
from musespark.moe.experts.bf16 import GroupedExperts
from musespark.parallel.layout import Layout
from musespark.parallel.mesh import build_mesh, place_on_mesh
from musespark.testing import make_checkpoint, tiny_config

EXPERTS = {"expert_parallel": True}
TRAVEL = {**EXPERTS, "moe_backend": "all_to_all"}
CUT = {**TRAVEL, "sequence_parallel": True}
FUSED = {"fuse_all_reduce": True}
WIDE: dict[str, Any] = {"moe_hidden_size": 256, "moe_intermediate_size": 256}


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
    "fused-tp4": {**tp(4), **FUSED},
    "fused-ep2": {**tp(2), **EXPERTS, **FUSED},
    "fused-hybrid": {**tp(4), **CUT, "hybrid_token_threshold": 8, **FUSED},
    "fused-pp2-tp2": {"pipeline_parallel_size": 2, **tp(2), **FUSED},
    "dp2-sp2-ep4": {"data_parallel_size": 2, **tp(2), **CUT},
}

# Fewer tokens than ranks, as many, more, and many more; both sides of the hybrid's threshold.
LENGTHS = (1, 2, 3, 4, 5, 8, 9, 21)
PROMPTS = (11, 1, 5)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Dense and sparse layers; of the NVFP4 experts, the first and the last layer's stay wide."""
    folder = tmp_path_factory.mktemp("layouts")
    plain = make_checkpoint(
        folder / "plain",
        dtype=torch.float32,
        vocab_size=130,  # not a multiple of four
        num_attention_heads=8,
        **WIDE,
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


def differences(workers, settings, folder, replicas, **options):
    """What every rank that hands out logits found."""
    world = Parallelism(**settings).world_size
    found = workers.run(world, replay, settings, str(folder), replicas, *options.values())
    found = [each for each in found if each is not None]
    assert len(found) == world // settings.get("pipeline_parallel_size", 1)
    assert {each.steps for each in found} == {max(len(each.steps) for each in replicas)}
    return found


@pytest.mark.parametrize("experts", ["bf16", "nvfp4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(workers, checkpoints, recordings, layout, experts):
    settings = LAYOUTS[layout]
    replicas = recordings[experts][: settings.get("data_parallel_size", 1)]
    for found in differences(workers, settings, checkpoints[experts], replicas):
        assert found.flips == 0
        assert found.logits <= 1e-4
        assert found.taps <= 1e-4


@pytest.mark.parametrize(
    "layout", ["tp4", "tp4-ep4", "fused-ep2", "hybrid", "dp2-sp2-ep4", "pp2-tp2"]
)
def test_packed_weights_in_bfloat16(workers, checkpoints, layout):
    """What serving uses. A sum over ranks rounds, which may flip an expert here and there."""
    decoder = load_decoder(checkpoints["nvfp4"], dtype="bfloat16")
    recording = record(decoder, (1, 4, 30), prompts=(9, 3), max_tokens=2)
    settings = LAYOUTS[layout]
    for found in differences(
        workers, settings, checkpoints["nvfp4"], [recording], dtype="bfloat16", pack=True
    ):
        assert found.typical <= 0.02


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_other_numbers_of_key_value_heads(workers, tmp_path, kv_heads, experts):
    """One that all four ranks hold; four, of which each rank has its own. Experts one by one."""
    folder = make_checkpoint(
        tmp_path / "model",
        dtype=torch.float32,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        per_expert=True,
    )
    recording = record(load_decoder(folder, dtype="float32"), (1, 4, 9), prompts=(9, 3))
    for found in differences(workers, {**tp(4), **experts}, folder, [recording]):
        assert found.flips == 0
        assert max(found.logits, found.taps) <= 1e-4


def test_a_stage_goes_on_while_the_next_one_is_behind(workers, checkpoints):
    assert workers.run(2, run_ahead, str(checkpoints["bf16"])) == [True, True]


def run_ahead(rank, folder):
    """The second stage starts only when the first one has five steps behind it."""
    parallelism = Parallelism(pipeline_parallel_size=2)
    mesh = build_mesh(parallelism, rank)
    decoder = load_decoder(folder, dtype="float32", parallelism=parallelism, mesh=mesh)
    batches = [ForwardBatch.uncached(torch.arange(length) + 1) for length in (3, 1, 4, 1, 5)]
    if rank == 1:
        dist.barrier()
    found = [decoder(batch) for batch in batches]
    if rank == 0:
        dist.barrier()
    else:
        whole = load_decoder(folder, dtype="float32")
        for logits, batch in zip(found, batches, strict=True):
            assert torch.allclose(logits, whole(batch), atol=1e-4)
    dist.barrier()
    return True


def test_which_steps_a_graph_can_record():
    """On a GPU, where nothing else waits; here the CPU's functions always do."""
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4, **WIDE)

    def recordable(name, num_tokens):
        parallelism = Parallelism(**LAYOUTS[name])
        layout = Layout(parallelism, place_on_mesh(parallelism, 0))
        decoder = Decoder(config, dtype=torch.bfloat16, device="meta", layout=layout)
        decoder.kernels = dataclasses.replace(decoder.kernels, waits_for_device=False)
        for module in decoder.layers.modules():
            if isinstance(module, GroupedExperts):
                module.__class__ = _NeverWaits
        return decoder.can_record(num_tokens)

    for name in ("tp2", "tp2-ep2", "dp2"):
        assert recordable(name, 1)
        assert recordable(name, 256)
    for name in ("dp2-ep2", "pp2", "dp2-sp2-ep4"):
        assert not recordable(name, 1)
    assert recordable("sp4", 3)
    assert not recordable("sp4", 4)
    assert recordable("hybrid", 8)
    assert not recordable("hybrid", 9)


class _NeverWaits(GroupedExperts):
    """As on a GPU with kernels."""

    waits_for_device = False
