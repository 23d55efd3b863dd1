"""Planned bytes, beside those that loading and the engine really take."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
from tests.planner.released import released

from musespark.checkpoint.inspect import inspect_checkpoint
from musespark.checkpoint.quantize import quantize_checkpoint
from musespark.config.engine import EngineConfig
from musespark.config.model import DecoderConfig
from musespark.config.parallel import Parallelism
from musespark.engine.capacity import plan_kv_cache
from musespark.errors import ConfigError
from musespark.llm.loading import load_decoder
from musespark.model.decoder import Decoder
from musespark.parallel import layout as layouts
from musespark.parallel.mesh import place_on_mesh
from musespark.planner.devices import DEVICES, find_device
from musespark.planner.layout import Layout, candidate_layouts, make_layout
from musespark.planner.memory import (
    Workload,
    largest_concurrency,
    largest_context,
    plan_memory,
    stage_cache,
    stage_weights,
    total_weights,
)
from musespark.testing import make_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_local_experts": 16,
}
H200, ONE = DEVICES["h200"], Layout(Parallelism())
EIGHT = make_layout(gpus=8, nodes=1, tp=8, ep=8, pp=None, dp=None)
MIX = ["dense", *["sparse"] * 5]


@pytest.fixture(scope="module", params=["bf16", "nvfp4"])
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    plain = make_checkpoint(root / "bf16", mlp_layer_types=MIX, **SMALL)
    if request.param == "nvfp4":
        quantize_checkpoint(plain, root / "nvfp4", exclude_layers=frozenset({5}))
    return root / request.param


def storages():
    """Address -> bytes of all tensors alive."""
    gc.collect()
    tensors = [
        thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)
    ]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_loading_allocates_what_was_planned(folder):
    before = storages()
    decoder = load_decoder(folder, dtype="bfloat16")
    allocated = sum(size for place, size in storages().items() if place not in before)
    planned = total_weights(decoder.config).total()
    assert planned == pytest.approx(allocated, rel=0.03)


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 8},
        {"tensor_parallel_size": 8, "expert_parallel": True},
        {"tensor_parallel_size": 32},  # more ranks than key-value heads
        {"tensor_parallel_size": 8, "pipeline_parallel_size": 2},
        {"data_parallel_size": 16, "expert_parallel": True, "moe_backend": "all_to_all"},
    ],
    ids=str,
)
@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
def test_ranks_of_the_released_model_hold_what_was_planned(settings, weight_format):
    """Weights and cache of every stage, without memory for them."""
    config = released(weight_format)
    parallelism = Parallelism(**settings)
    planned = Layout(parallelism, parallelism.world_size)
    workload = Workload(4096, 32)
    for stage in planned.stages(config):
        rank = parallelism.tensor_parallel_size * (0 if stage.is_first else 1)
        layout = layouts.Layout(parallelism, place_on_mesh(parallelism, rank))
        decoder = Decoder(config, dtype=torch.bfloat16, device="meta", layout=layout)
        held = sum(weight.nbytes for weight in decoder.parameters())
        assert stage_weights(config, planned, stage).total() == held
        engine = EngineConfig(max_num_seqs=workload.concurrency // planned.dp, max_model_len=4096)
        made = plan_kv_cache(config, engine, torch.bfloat16, 10**13, layout=layout)
        assert sum(stage_cache(config, planned, stage, workload)) == made.num_bytes


def test_parts_are_those_of_the_files(folder):
    on_disk = inspect_checkpoint(folder).bytes_by_part
    assert dict(total_weights(DecoderConfig.from_folder(folder))) == on_disk


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("context", [5000, 131072])
def test_the_cache_is_the_one_that_the_engine_makes(kv_dtype, context):
    engine = EngineConfig(max_num_seqs=32, max_model_len=context, kv_cache_dtype=kv_dtype)
    made = plan_kv_cache(released(), engine, torch.bfloat16, 10**13)
    memory = plan_memory(released(), ONE, H200, Workload(context, 32, kv_dtype))
    assert memory.kv_bytes == made.num_bytes


def test_the_released_model_in_nvfp4():
    """529 GB are the text decoder; published files hold towers beside it."""
    memory = plan_memory(released(), EIGHT, H200, Workload(131072, 32, "fp8_e4m3"))
    assert memory.total_weights == pytest.approx(533e9, rel=0.01)
    assert memory.total_weights / 8 == pytest.approx(67e9, rel=0.02)
    # Router, pooler and unpooler are on every GPU.
    copied = sum(memory.weights[part] for part in ("router", "pooler and unpooler"))
    split = memory.weights["router, split"]
    assert split == 62 * 256 * 8192 * 6
    read = memory.weight_bytes - split
    assert read == pytest.approx((memory.total_weights + 7 * copied) / 8, rel=0.001)
    assert memory.fits


def test_the_released_model_in_bf16():
    assert total_weights(released("bf16")).total() == pytest.approx(1.64e12, rel=0.01)
    workload = Workload(131072, 32)
    two = [plan_memory(released("bf16"), each, H200, workload)
           for each in candidate_layouts(released("bf16"), 8, 2)]  # fmt: skip
    assert any(memory.fits for memory in two)
    assert not plan_memory(released("bf16"), EIGHT, H200, workload).fits


def test_cache_per_token_is_as_stated():
    """64 KiB a token over the full layers in bfloat16; 377 MiB of windows (and two blocks) each."""
    memory = plan_memory(released(), ONE, H200, Workload(2**20, 1))
    assert memory.kv_full == 2**20 * 64 * 2**10
    more = plan_memory(released(), ONE, H200, Workload(2**20, 2))
    window = 46 * 2048 * 2048 * 2
    assert more.kv_sliding - memory.kv_sliding == pytest.approx(window, rel=0.02)


@pytest.mark.parametrize("name", ["h200", "h100-80g", "b200"])
def test_the_largest_that_fit_are_the_largest(name):
    config, device, workload = released(), DEVICES[name], Workload(65536, 16, "fp8_e4m3")
    context = largest_context(config, EIGHT, device, workload)
    count = largest_concurrency(config, EIGHT, device, workload)
    assert context > 0
    assert count > 0
    for asked in (
        dataclasses.replace(workload, context=context),
        dataclasses.replace(workload, concurrency=count),
    ):
        assert plan_memory(config, EIGHT, device, asked).fits
    for asked in (
        dataclasses.replace(workload, context=context + 16),
        dataclasses.replace(workload, concurrency=count + 1),
    ):
        if asked.context <= config.max_position_embeddings:
            assert not plan_memory(config, EIGHT, device, asked).fits


@pytest.mark.parametrize(
    "layout", list(candidate_layouts(released(), 8, 1)), ids=lambda it: it.name
)
def test_all_ranks_together_hold_every_weight(layout):
    """Cut parts add up to the whole; nothing is lost between stages."""
    config, whole = released(), total_weights(released())
    held = sum(
        (stage_weights(config, layout, stage) for stage in layout.stages(config)),
        start=type(whole)(),
    )
    group = layout.tp * layout.dp
    for part in ("attention", "embedding", "output projection"):
        assert held[part] * layout.tp == whole[part]
    shares = group if layout.ep > 1 else layout.tp
    assert held["experts"] * shares == pytest.approx(whole["experts"], rel=1e-5)
    assert held["pooler and unpooler"] == whole["pooler and unpooler"]


def test_more_ranks_than_key_value_heads_hold_copies():
    layout = make_layout(gpus=8, nodes=4, tp=32, ep=None, pp=None, dp=None)
    layout.check(released())
    assert layout.kv_heads(released()) == 1


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"tp": 3}, "gpus"),
        ({"tp": 4, "ep": 4}, "ep"),
        ({"tp": 0}, "tp"),
        ({"dp": 0}, "dp"),
        ({"tp": 4, "pp": 4}, "gpus"),
    ],
)
def test_layouts_that_cannot_be_are_refused(sizes, named):
    with pytest.raises(ConfigError, match=f"^{named}: "):
        make_layout(
            gpus=8, nodes=1, **{"tp": None, "ep": None, "pp": None, "dp": None} | sizes
        ).check(released())


def test_an_unknown_gpu_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="mean h200"):
        find_device("h20O")
    assert find_device("H100").name == "h100-80g"
    assert all(device.source for device in DEVICES.values())
