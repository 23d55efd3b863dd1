from typing import Any

import pytest

from musespark.config.parallel import Parallelism
from musespark.errors import ConfigError
from musespark.moe.deployment import validate_deployment
from musespark.testing import tiny_config

ALL_TO_ALL = {"moe_backend": "all_to_all", "expert_parallel": True}
SEQUENCE = {**ALL_TO_ALL, "tensor_parallel_size": 4, "sequence_parallel": True}
SHARED: dict[str, Any] = {**ALL_TO_ALL, "sequence_parallel": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
BIG = {"moe_hidden_size": 256, "moe_intermediate_size": 512}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size: must be 1 or more, found 0"]),
        ({"pipeline_parallel_size": -1}, ["pipeline_parallel_size: must be 1 or more"]),
        ({"data_parallel_size": 0}, ["data_parallel_size: must be 1 or more"]),
        ({"moe_backend": "marlin"}, ["moe_backend: must be one of auto,", "'marlin'"]),
        ({"enable_lora": True}, ["enable_lora", "Merge the adapter"]),
        ({"enable_eplb": True}, ["enable_eplb", "Leave enable_eplb out"]),
        ({"skip_final_all_reduce": True}, ["skip_final_all_reduce", "before the post-expert norm"]),
        (
            {"sequence_parallel": True, "tensor_parallel_size": 2},
            ["sequence_parallel", "would mix tokens", "Set moe_backend to all_to_all"],
        ),
        ({**ALL_TO_ALL, "sequence_parallel": True}, ["Raise tensor_parallel_size"]),
        ({**SEQUENCE, "pipeline_parallel_size": 2}, ["Set pipeline_parallel_size to 1"]),
        ({"fuse_all_reduce": True}, ["fuse_all_reduce: there is nothing", "Raise tensor_parallel"]),
        ({"moe_backend": "all_to_all"}, ["moe_backend", "Turn expert_parallel on"]),
        (
            {"expert_parallel": True, "data_parallel_size": 2},
            ["expert_parallel: each of the 2 replicas", "Set moe_backend to all_to_all"],
        ),
        ({**ALL_TO_ALL, "tensor_parallel_size": 2}, ["moe_backend", "Turn sequence_parallel on"]),
        ({"hybrid_token_threshold": 64}, ["hybrid_token_threshold", "Set moe_backend"]),
        ({**SEQUENCE, "hybrid_token_threshold": 0}, ["hybrid_token_threshold: must be 1 or more"]),
        (
            {**SEQUENCE, "hybrid_token_threshold": 64, "tensor_parallel_size": 2},
            ["needs tensor_parallel_size 4 or 8, found 2"],
        ),
        (
            {**SEQUENCE, "hybrid_token_threshold": 64, "data_parallel_size": 2},
            ["needs data_parallel_size 1, found 2"],
        ),
    ],
)
def test_settings_that_exclude_each_other(settings, parts):
    with pytest.raises(ConfigError) as caught:
        Parallelism(**settings)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 4, "expert_parallel": True},
        {**ALL_TO_ALL, "data_parallel_size": 2},
        SEQUENCE,
        {**SEQUENCE, "hybrid_token_threshold": 64},
    ],
)
def test_settings_that_go_together(settings):
    parallelism = Parallelism(**settings)
    config = tiny_config(num_attention_heads=8, num_key_value_heads=4, num_local_experts=16, **BIG)
    validate_deployment(config, parallelism)


def test_sizes():
    cut = Parallelism(tensor_parallel_size=4, data_parallel_size=2, pipeline_parallel_size=3)
    assert (cut.world_size, cut.expert_parallel_size, cut.expert_tensor_size) == (24, 1, 4)
    handed_out = Parallelism(tensor_parallel_size=4, data_parallel_size=2, **SHARED)
    assert (handed_out.expert_parallel_size, handed_out.expert_tensor_size) == (8, 1)


@pytest.mark.parametrize(
    ("model", "settings", "parts"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            {"tensor_parallel_size": 4},
            ["tensor_parallel_size: 6 attention heads", "divides 6"],
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {"tensor_parallel_size": 4},
            ["6 key-value heads can neither be cut into 4", "a multiple of it"],
        ),
        ({}, {"pipeline_parallel_size": 7}, ["pipeline_parallel_size: 7 stages for 6 layers"]),
        (
            {"num_local_experts": 6},
            {"tensor_parallel_size": 2, "data_parallel_size": 2, **SHARED},
            ["expert_parallel: 6 experts", "4 processes", "divides 6"],
        ),
        (
            {"moe_intermediate_size": 30},
            {"tensor_parallel_size": 4},
            ["moe_intermediate_size (30)", "4 equal shares.", "turn expert_parallel on"],
        ),
        (
            {"moe_intermediate_size": 32, "quantization_config": NVFP4},
            {"tensor_parallel_size": 4},
            ["moe_intermediate_size (32)", "in blocks of 16", "divides 2"],
        ),
        (
            {"moe_hidden_size": 256, "moe_intermediate_size": 320},
            {**ALL_TO_ALL, "data_parallel_size": 2},
            ["needs moe_intermediate_size in multiples of 256, found 320"],
        ),
        (
            {},
            {**ALL_TO_ALL, "data_parallel_size": 2},
            ["needs moe_hidden_size in multiples of 256, found 48"],
        ),
        ({}, {"moe_backend": "w4a4"}, ["moe_backend: w4a4", "Quantize it first"]),
    ],
)
def test_deployments_that_do_not_fit_the_model(model, settings, parts):
    with pytest.raises(ConfigError) as caught:
        validate_deployment(tiny_config(**model), Parallelism(**settings))
    for part in parts:
        assert part in str(caught.value)


def test_key_value_heads_are_copied_where_there_are_more_processes():
    config = tiny_config(num_attention_heads=8, num_key_value_heads=2)
    validate_deployment(config, Parallelism(tensor_parallel_size=4, expert_parallel=True))


def test_dense_models_have_no_experts_to_cut():
    config = tiny_config(mlp_layer_types="dense", num_local_experts=6, moe_intermediate_size=30)
    validate_deployment(config, Parallelism(tensor_parallel_size=4))


@pytest.mark.parametrize(
    ("model", "name"),
    [({"scoring_func": "softmax"}, "scoring_func"), ({"routed_scaling_factor": 2.5}, "routed_")],
)
def test_a_kernel_that_routes_by_itself_knows_one_recipe(model, name):
    config = tiny_config(**model)
    validate_deployment(config, Parallelism())
    with pytest.raises(ConfigError, match=f"moe_backend: its kernel routes by itself.*{name}"):
        validate_deployment(config, Parallelism(), kernel_routes=True)
    validate_deployment(tiny_config(), Parallelism(), kernel_routes=True)
