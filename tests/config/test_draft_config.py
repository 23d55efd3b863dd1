"""A draft's config.json: what is read, what is refused, and whose draft it is."""

import json

import pytest

from musespark.config.draft import DraftConfig
from musespark.errors import ConfigError
from musespark.testing import draft_fields, tiny_config

TARGET = tiny_config()

# The published draft of the released model.
RELEASED = {
    **draft_fields(TARGET),
    "hidden_size": 8192,
    "num_hidden_layers": 5,
    "target_layer_ids": [13, 29, 45, 57, 61],
    "target_hidden_size": 8192,
    "global_attn_cfg": [2048],
    "block_size": 7,
    "markov_rank": 512,
    "vocab_size": None,
    "metap": {
        "use_metap": True,
        "metap_mode": "sp",
        "base_width": 256,
        "router_has_one_inf_dim": True,
    },
}


def error_of(fields, where="some/config.json"):
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict(fields, where=where)
    message = str(caught.value)
    assert message.startswith(where)
    return message


def with_fields(**changes):
    return draft_fields(TARGET, **changes)


def without(name):
    fields = draft_fields(TARGET)
    del fields[name]
    return fields


def test_the_published_draft():
    config = DraftConfig.from_dict(RELEASED)
    assert config.target_layer_ids == (13, 29, 45, 57, 61)
    assert {layer.sliding_window for layer in config.layers} == {2048}
    assert config.max_tokens == 7
    assert config.intermediate_size == 1.5 * 8192
    assert config.output_multiplier == pytest.approx(32**-0.5)
    assert config.attention_scale == pytest.approx(3.87 / 4)
    assert config.causal
    assert config.sample_from_anchor


def test_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(with_fields()))
    assert DraftConfig.from_folder(tmp_path) == DraftConfig.from_dict(with_fields())
    with pytest.raises(ConfigError, match="no such file"):
        DraftConfig.from_folder(tmp_path / "elsewhere")


def test_what_a_matter_of_course_may_be_left_out():
    names = (
        "rms_post_norm_eps", "every_n_layers_nope", "global_attn_cfg", "metap",
        "output_soft_cap_temp", "confidence_head_with_markov", "vocab_size",
    )  # fmt: skip
    fields = {name: value for name, value in with_fields().items() if name not in names}
    config = DraftConfig.from_dict(fields)
    assert config.rms_post_norm_eps == config.rms_norm_eps
    assert config.output_soft_cap_temp is None
    assert config.output_multiplier == 1
    assert {layer.sliding_window for layer in config.layers} == {None}


@pytest.mark.parametrize(
    "name",
    [
        "hidden_size", "num_hidden_layers", "head_dim", "rms_norm_eps", "norm_affine",
        "post_norm_affine", "norm_zero_centered_gamma", "post_norm_gain_center_type",
        "output_norm_gain_center_type", "use_qk_norm", "use_attn_o_norm", "use_attn_o_gate",
        "use_residual_gate", "use_ffn_learnable_scales", "residual_dtype", "use_rope",
        "rope_theta", "use_sqrt_attn_scaling", "ffn_dim_multiplier", "target_layer_ids",
        "target_hidden_size", "mask_token_id", "block_size", "markov_rank",
        "enable_confidence_head", "draft_vocab_size",
    ],
)  # fmt: skip
def test_what_changes_the_draft_must_be_stated(name):
    assert f"{name}: is missing" in error_of(without(name))


def test_typos():
    message = error_of(without("markov_rank") | {"markov_rnk": 8})
    assert "is 'markov_rnk' a typo of it?" in message
    message = error_of(with_fields(use_ropee=True))
    assert "unknown field: 'use_ropee' (did you mean 'use_rope'?)" in message
    message = error_of(with_fields(metap={"use_metap": True, "base_widht": 16, "base_width": 16}))
    assert "metap: unknown field: 'base_widht' (did you mean 'base_width'?)" in message
    message = error_of(with_fields(post_norm_gain_center_type="ones"))
    assert "found 'ones' (did you mean 'one'?)" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "muse_spark"}, "model_type: a draft's must be 'muse_spark_dspark'"),
        ({"residual_dtype": "fp16"}, "residual_dtype: must be one of 'bf16', 'fp32'"),
        (
            {"output_norm_gain_center_type": "inverse_residual_index"},
            "must be one of 'one', 'zero'",
        ),
        ({"num_key_value_heads": 3}, "must be a multiple of it, found 3"),
        ({"head_dim": 15}, "head_dim: must be even"),
        ({"ffn_dim_multiplier": 0.001}, "ffn_dim_multiplier: leaves"),
        ({"intermediate_size_mlp": 5}, "intermediate_size_mlp: ffn_dim_multiplier makes it 96"),
        ({"target_layer_ids": []}, "target_layer_ids: must be a list of layer numbers"),
        ({"target_layer_ids": [1, "2"]}, "target_layer_ids: must be a list of layer numbers"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids: must ascend"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids: must ascend"),
        ({"target_layer_ids": [-2, 1]}, "target_layer_ids: must ascend, from -1 on"),
        ({"mask_token_id": -1}, "mask_token_id: must not be negative"),
        ({"markov_rank": 0}, "confidence_head_with_markov: needs a Markov head"),
        ({"markov_rank": -1}, "markov_rank: must not be negative"),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size: must be 2 or more"),
        ({"global_attn_cfg": [8, "all"]}, "global_attn_cfg[1]: must be a window in tokens, or 0"),
        ({"global_attn_cfg": [-1]}, "global_attn_cfg[0]: must be a window"),
        ({"draft_position_mode": "nope"}, "draft_position_mode: is 'nope', but use_rope says"),
        ({"metap": {"use_metap": True}}, "metap: base_width: is missing"),
        ({"moe": {"is_enabled": True}}, "moe: a draft with experts is not supported"),
    ],
)
def test_what_is_refused(changes, said):
    assert said in error_of(with_fields(**changes))


def kinds(**changes):
    config = DraftConfig.from_dict(with_fields(**changes))
    return [(layer.rope_theta > 0, layer.sliding_window) for layer in config.layers]


def test_patterns_end_at_the_last_layer():
    """Every third layer from the last has no RoPE, and the cycle's last window is the last's."""
    found = kinds(num_hidden_layers=5, every_n_layers_nope=3, global_attn_cfg=[6, 3, 0])
    assert found == [(True, 3), (False, None), (True, 6), (True, 3), (False, None)]
    found = kinds(num_hidden_layers=6, every_n_layers_nope=3, global_attn_cfg=[6, 3, 0])
    assert found == [(True, 6), (True, 3), (False, None)] * 2


def test_temperature_is_for_global_layers_and_needs_both_numbers():
    tuned = {
        "num_hidden_layers": 2,
        "every_n_layers_nope": 2,
        "global_attn_cfg": [4, 0],
        "attn_temperature_tuning_layers": "global",
        "attn_temperature_tuning_floor_scale": 100,
        "attn_temperature_tuning_q_scale_constant": 0.1,
    }
    layers = DraftConfig.from_dict(with_fields(**tuned)).layers
    assert [layer.tunes_temperature for layer in layers] == [False, True]
    for name in tuned:
        if name.startswith("attn"):
            layers = DraftConfig.from_dict(with_fields(**tuned | {name: None})).layers
            assert not any(layer.tunes_temperature for layer in layers)


def test_query_scales():
    def scale(**changes):
        return DraftConfig.from_dict(with_fields(head_dim=64, **changes)).attention_scale

    assert scale() == pytest.approx(3.87 / 8)
    assert scale(use_sqrt_attn_scaling=False) == pytest.approx(43.7840518911 / 8 / 8)
    assert scale(use_qk_norm=False) == pytest.approx(1 / 8)


def test_multipliers():
    def multiplier(**metap):
        fields = with_fields(metap={"base_width": 16, **metap})
        return DraftConfig.from_dict(fields).output_multiplier

    assert multiplier(use_metap=False) == 1
    assert multiplier(use_metap=True, metap_mode="mup") == pytest.approx(1 / 4)
    assert multiplier(use_metap=True, metap_mode="sp") == pytest.approx(1 / 2)


def test_gain_centres():
    def config(**changes):
        return DraftConfig.from_dict(with_fields(**changes))

    assert config().gain_center(4) == 1
    assert config(post_norm_gain_center_type="zero").gain_center(4) == 0
    by_index = config(post_norm_gain_center_type="inverse_residual_index")
    assert by_index.gain_center(4) == 1 / 4
    plain = config(norm_zero_centered_gamma=False, output_norm_gain_center_type="one")
    assert (plain.gain_center(4), plain.pre_norm_center, plain.output_norm_center) == (0, 0, 0)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"hidden_size": 128}, "target_hidden_size is 64, but the target's hidden_size is 128"),
        ({"hidden_size": 128}, "hidden_size is 64, but tokens are embedded by the target's table"),
        (
            {"num_hidden_layers": 3},
            "target_layer_ids has layer 5, but the target's last layer is 2",
        ),
        ({"vocab_size": 256}, "vocab_size is 128, but the target's is 256"),
        ({"vocab_size": 100}, "draft_vocab_size is 128, but the target has no more than 100"),
        ({"layer_types": "sliding"}, "layer 0 of the draft sees further back"),
    ],
)
def test_a_draft_for_another_target(other, said):
    config = DraftConfig.from_dict(with_fields())
    config.check_target(TARGET)
    with pytest.raises(ConfigError, match="draft: made for another target") as caught:
        config.check_target(tiny_config(**other))
    assert said in str(caught.value)
    assert "Set `draft` to one that was trained for this model" in str(caught.value)


def test_a_mask_outside_the_targets_vocabulary():
    config = DraftConfig.from_dict(with_fields(mask_token_id=128))
    with pytest.raises(ConfigError, match="mask_token_id is 128, but the target's vocabulary ends"):
        config.check_target(TARGET)


def test_more_tokens_than_a_block():
    config = DraftConfig.from_dict(with_fields(block_size=7))
    config.check_num_tokens(7)
    for wrong in (0, 8):
        with pytest.raises(ConfigError, match="num_speculative_tokens: must be from 1 to 7"):
            config.check_num_tokens(wrong)
    # Where the anchor's row proposes nothing, a block proposes one token less.
    config = DraftConfig.from_dict(with_fields(block_size=7, sample_from_anchor=False))
    with pytest.raises(ConfigError, match="must be from 1 to 6"):
        config.check_num_tokens(7)
