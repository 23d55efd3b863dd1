import time

import pytest

from musespark.config.quantization import QuantizationConfig
from musespark.errors import ConfigError


def quantized_layers(*patterns, num_layers=12, num_experts=3):
    quantization = QuantizationConfig(exclude_modules=patterns)
    return [
        layer
        for layer in range(num_layers)
        if not quantization.excludes_experts(layer, num_experts)
    ]


ALL = list(range(12))


@pytest.mark.parametrize("tree", ["model.language_model.", "language_model.model.", "model.", ""])
@pytest.mark.parametrize(
    "ending", ["", ".mlp", ".mlp*", ".mlp.experts", ".mlp.experts*", ".mlp.experts.*", "*"]
)
def test_a_layer_is_excluded_under_any_name_of_it(tree, ending):
    left = quantized_layers(f"{tree}layers.3{ending}", f"{tree}layers.11{ending}")
    assert left == [layer for layer in ALL if layer not in (3, 11)]


def test_layer_1_is_not_layer_10_or_11():
    assert quantized_layers("model.layers.1.mlp*") == [0, *range(2, 12)]
    assert quantized_layers("model.layers.1.*") == [0, *range(2, 12)]


def test_a_star_that_runs_into_the_number_is_meant_as_written():
    assert quantized_layers("model.layers.1*") == [0, *range(2, 10)]


def test_any_prefix_by_wildcard():
    assert quantized_layers("*.layers.5.mlp.experts*") == [0, 1, 2, 3, 4, *range(6, 12)]
    assert quantized_layers("*") == []


def test_tensors_by_name():
    left = quantized_layers(
        "model.language_model.layers.0.mlp.experts.gate_up_proj",
        "model.language_model.layers.0.mlp.experts.down_proj",
    )
    assert left == ALL[1:]


def test_experts_one_by_one():
    names = [
        f"model.layers.2.mlp.experts.{expert}.{name}_proj"
        for expert in range(3)
        for name in ("gate", "up", "down")
    ]
    assert quantized_layers(*names) == [0, 1, *range(3, 12)]


def test_modules_beside_the_experts_leave_them_alone():
    assert (
        quantized_layers(
            "lm_head",
            "model.language_model.embed_tokens",
            "model.language_model.layers.*.self_attn*",
            "model.language_model.layers.*.mlp.gate",
            "model.language_model.layers.*.mlp.pre_expert_proj",
            "model.vision_tower*",
        )
        == ALL
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.4.mlp.experts.gate_up_proj",
        "model.layers.4.mlp.experts.1.down_proj",
        "model.layers.4.mlp.experts.2.*",
    ],
)
def test_half_a_layer_is_refused(pattern):
    with pytest.raises(ConfigError, match=r"experts of layer 4, some are excluded"):
        quantized_layers(pattern)


def test_long_lists_of_single_experts_are_quick():
    names = [
        f"model.language_model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in (0, 61)
        for expert in range(256)
        for name in ("gate", "up", "down")
    ]
    started = time.process_time()
    assert quantized_layers(*names, num_layers=62, num_experts=256) == list(range(1, 61))
    assert time.process_time() - started < 5
