import json

import pytest
from transformers import MuseSparkTextConfig

from musespark.config.model import DecoderConfig
from musespark.config.quantization import QuantizationConfig, read_quantization
from musespark.errors import ConfigError

NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head", "model.language_model.layers.0.mlp*", "*.self_attn.*"],
}


def read(changes):
    return read_quantization(NVFP4 | changes, "config.json: quantization_config")


def test_exclusions_are_wildcards_over_module_names():
    quantization = read({})
    assert quantization.excludes("lm_head")
    assert quantization.excludes("model.language_model.layers.0.mlp.experts")
    assert quantization.excludes("model.language_model.layers.7.self_attn.q_proj")
    assert not quantization.excludes("model.language_model.layers.1.mlp.experts")
    assert not quantization.excludes("model.language_model.layers.10.mlp.experts")


def test_a_module_s_name_excludes_what_is_inside_it():
    quantization = QuantizationConfig(exclude_modules=("model.layers.1",))
    assert quantization.excludes("model.layers.1.mlp.experts")
    assert not quantization.excludes("model.layers.11.mlp.experts")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8_e4m3"),
    ],
)
def test_kv_cache(changes, expected):
    assert read(changes).kv_cache_dtype == expected


def test_config_json_and_hf_quant_config_agree(tmp_path):
    fields = MuseSparkTextConfig().to_dict()
    inside = DecoderConfig.from_dict(fields | {"quantization_config": NVFP4})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    beside = {
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "group_size": 16,
            "exclude_modules": NVFP4["ignore"],
        },
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert DecoderConfig.from_folder(tmp_path) == inside
    assert inside.quantization == read({})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"quant_method": None}, ["quant_method: is missing"]),
        ({"quant_method": "awq"}, ["quant_method: only 'modelopt'", "'awq'"]),
        ({"quant_algo": "FP8"}, ["quant_algo: only 'NVFP4'", "'FP8'"]),
        ({"quant_algo": None}, ["quant_algo: is missing"]),
        ({"group_size": 32}, ["group_size", "found 32"]),
        (
            {"config_groups": {"group_0": {"weights": {"group_size": 128}}}},
            ["group_size", "found 128"],
        ),
        ({"config_groups": {"group_0": 4}}, ["config_groups", "'group_0' must be an object"]),
        ({"ignore": "lm_head"}, ["ignore: must be a list"]),
        ({"ignore": [3]}, ["ignore: must be a list of module names"]),
        ({"kv_cache_quant_algo": "INT4"}, ["kv_cache_quant_algo", "'INT4'"]),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, ["kv_cache_quant_algo", "4"]),
    ],
)
def test_unsupported_quantization_is_named(changes, parts):
    with pytest.raises(ConfigError) as caught:
        read(changes)
    message = str(caught.value)
    assert message.startswith("config.json: quantization_config: ")
    for part in parts:
        assert part in message


def test_quantization_that_is_no_object():
    with pytest.raises(ConfigError, match=r"config\.json: must be an object, found 4"):
        read_quantization(4, "config.json")
