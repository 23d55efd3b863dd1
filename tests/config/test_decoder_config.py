import json
import math

import pytest
from transformers import MuseSparkConfig, MuseSparkTextConfig

from musespark.config.model import DecoderConfig
from musespark.errors import ConfigError
from musespark.testing import tiny_config


def released_fields():
    """The released model's text config, as transformers writes it."""
    return MuseSparkTextConfig().to_dict()


def error_of(fields, where="some/config.json"):
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_dict(fields, where=where)
    message = str(caught.value)
    assert message.startswith(where)
    return message


def test_released_config():
    config = DecoderConfig.from_dict(released_fields())
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (8192, 62, 202048)
    full = [index for index, layer in enumerate(config.layers) if layer.rope_theta == 0]
    assert full == list(range(1, 62, 4))
    assert all(
        (layer.attention == "full_attention") == (layer.rope_theta == 0) for layer in config.layers
    )
    assert {layer.sliding_window for layer in config.layers} == {None, 2048}
    assert {layer.mlp for layer in config.layers} == {"sparse"}
    assert config.has_sparse_layers
    assert config.eos_token_ids == (200_001,)
    assert config.attention_scale == pytest.approx(5.4730064863875 / 8)


def test_round_trip_of_the_released_config():
    config = DecoderConfig.from_dict(released_fields())
    assert DecoderConfig.from_dict(config.to_dict()) == config
    through_json = json.loads(json.dumps(config.to_dict()))
    assert DecoderConfig.from_dict(through_json) == config


def test_transformers_reads_what_to_dict_writes():
    config = DecoderConfig.from_dict(released_fields())
    read = MuseSparkTextConfig(**config.to_dict())
    assert DecoderConfig.from_dict(read.to_dict()) == config


@pytest.mark.parametrize("wrap", [MuseSparkConfig, MuseSparkTextConfig])
def test_config_json_of_transformers(wrap, tmp_path):
    wrap().save_pretrained(tmp_path)
    assert DecoderConfig.from_folder(tmp_path) == DecoderConfig.from_dict(released_fields())
    assert DecoderConfig.from_dict(wrap().to_dict()) == DecoderConfig.from_dict(released_fields())


def test_layer_lists_are_read_not_derived():
    config = tiny_config(
        num_hidden_layers=3,
        layer_types=["full", "sliding", "full"],
        layer_rope_theta=[10_000, 0, 500_000.0],
        mlp_layer_types=["dense", "sparse", "dense"],
    )
    assert [layer.attention for layer in config.layers] == [
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]
    assert [layer.rope_theta for layer in config.layers] == [10_000.0, 0.0, 500_000.0]
    assert [layer.mlp for layer in config.layers] == ["dense", "sparse", "dense"]
    assert [layer.sliding_window for layer in config.layers] == [None, 8, None]
    assert DecoderConfig.from_dict(config.to_dict()) == config


def test_token_ids_beside_the_text_config():
    fields = MuseSparkConfig().to_dict()
    del fields["text_config"]["bos_token_id"], fields["text_config"]["eos_token_id"]
    fields |= {"bos_token_id": 5, "eos_token_id": [6, 7]}
    config = DecoderConfig.from_dict(fields)
    assert (config.bos_token_id, config.eos_token_ids) == (5, (6, 7))


def test_end_tokens_beyond_a_small_vocabulary_are_accepted():
    assert DecoderConfig.from_dict(released_fields() | {"vocab_size": 100}).vocab_size == 100


# One wrong field each, and what the message must say besides the file.
WRONG = {
    "typo": (
        {"num_hiden_layers": 62, "num_hidden_layers": None},
        ["num_hidden_layers: is missing", "'num_hiden_layers' a typo"],
    ),
    "unknown field": (
        {"qk_scale_facter": 1.0},
        ["unknown field: 'qk_scale_facter'", "did you mean 'qk_scale_factor'?"],
    ),
    "missing number": ({"moe_hidden_size": None}, ["moe_hidden_size: is missing"]),
    "missing list": ({"layer_types": None}, ["layer_types: is missing"]),
    "short list": (
        {"mlp_layer_types": ["sparse"] * 61},
        ["mlp_layer_types: has 61 entries", "num_hidden_layers is 62"],
    ),
    "long list": (
        {"layer_rope_theta": [0.0] * 63},
        ["layer_rope_theta: has 63 entries", "num_hidden_layers is 62"],
    ),
    "not a list": ({"layer_types": "full_attention"}, ["layer_types: must be a list"]),
    "unknown layer type": (
        {"layer_types": ["full_attention"] * 61 + ["sliding_atention"]},
        ["layer_types[61]", "'sliding_atention'", "did you mean 'sliding_attention'?"],
    ),
    "unknown mlp type": (
        {"mlp_layer_types": ["sparse"] * 61 + ["moe"]},
        ["mlp_layer_types[61]", "must be one of 'sparse', 'dense'", "'moe'"],
    ),
    "theta of the wrong type": (
        {"layer_rope_theta": [None] + [0.0] * 61},
        ["layer_rope_theta[0]: must be a number, found None"],
    ),
    "negative theta": (
        {"layer_rope_theta": [-1.0] + [0.0] * 61},
        ["layer_rope_theta[0]", "must not be negative: -1.0"],
    ),
    "text for a number": ({"hidden_size": "8192"}, ["hidden_size: must be a whole number", "8192"]),
    "true for a number": ({"hidden_size": True}, ["hidden_size: must be a whole number", "True"]),
    "fraction of a size": ({"head_dim": 64.5}, ["head_dim: must be a whole number", "64.5"]),
    "zero": ({"vocab_size": 0}, ["vocab_size: must be greater than 0, found 0"]),
    "not a number": (
        {"output_multiplier": math.nan},
        ["output_multiplier: must be greater than 0, found nan"],
    ),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act: only 'silu' is supported", "'gelu'"]),
    "RoPE type": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}},
        ["rope_parameters: rope_type: must be 'default'", "'yarn'"],
    ),
    "RoPE field": (
        {"rope_parameters": {"rope_theta": 5e5, "factor": 4.0}},
        ["rope_parameters: unknown field: 'factor'"],
    ),
    "RoPE per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        ["rope_parameters: unknown field: 'full_attention'"],
    ),
    "partly rotated heads": (
        {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        ["partial_rotary_factor", "found 0.5"],
    ),
    "scaled RoPE": ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling", "not supported"]),
    "shared experts": ({"num_shared_experts": 1}, ["num_shared_experts", "found 1"]),
    "expert groups": ({"n_group": 4}, ["n_group: grouped routing is not supported, found 4"]),
    "bias": ({"attention_bias": True}, ["attention_bias", "not supported"]),
    "tied head": ({"tie_word_embeddings": True}, ["tie_word_embeddings", "not supported"]),
    "heads that do not divide": (
        {"num_key_value_heads": 12},
        ["num_key_value_heads", "num_attention_heads (128) must be a multiple of it, found 12"],
    ),
    "odd head": ({"head_dim": 63}, ["head_dim: must be even", "found 63"]),
    "more choices than experts": (
        {"num_experts_per_tok": 257},
        ["num_experts_per_tok: cannot exceed num_local_experts (256), found 257"],
    ),
    "scoring function": (
        {"scoring_func": "tanh"},
        ["scoring_func: must be 'sigmoid' or 'softmax', found 'tanh'"],
    ),
    "end token": ({"eos_token_id": ["</s>"]}, ["eos_token_id", "found ['</s>']"]),
    "another model": ({"model_type": "llama"}, ["model_type", "'muse_spark_text'", "'llama'"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_field_is_named(case):
    changes, parts = WRONG[case]
    message = error_of(released_fields() | changes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("case", [case for case in WRONG if case != "another model"])
def test_wrong_field_of_a_nested_config_is_named(case):
    changes, parts = WRONG[case]
    fields = MuseSparkConfig().to_dict()
    fields["text_config"] |= changes
    message = error_of(fields)
    assert "config.json: text_config: " in message
    for part in parts:
        assert part in message


def test_nested_config_of_another_model():
    message = error_of(MuseSparkConfig().to_dict() | {"model_type": "llava"})
    assert "model_type: must be 'muse_spark', found 'llava'" in message


def test_text_config_misspelt_or_missing():
    fields = MuseSparkConfig().to_dict()
    fields["text_confg"] = fields.pop("text_config")
    assert "text_config: is missing; is 'text_confg' a typo of it?" in error_of(fields)
    del fields["text_confg"]
    assert "text_config: is missing" in error_of(fields)
    assert "text_config: must be an object" in error_of(fields | {"text_config": 3})


def test_misspelt_field_beside_the_text_config():
    fields = MuseSparkConfig().to_dict() | {"quantisation_config": {}}
    message = error_of(fields)
    assert "'quantisation_config' (did you mean 'quantization_config'?)" in message


def test_all_unknown_fields_are_in_one_error():
    message = error_of(released_fields() | {"vocab_sise": 1, "head_dims": 2})
    assert "unknown fields: " in message
    assert "'vocab_sise'" in message
    assert "'head_dims'" in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, found list"),
        (b"\xff\xfe{}", "cannot be read"),
    ],
)
def test_unreadable_file(tmp_path, content, part):
    path = tmp_path / "config.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_folder(tmp_path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)
