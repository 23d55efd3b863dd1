"""Tiny decoder configs with every feature of the released model, and easy changes to them."""

from typing import Any

from musespark.config.model import DecoderConfig

# A field given as one value stands for all layers.
_PER_LAYER = ("layer_types", "mlp_layer_types", "layer_rope_theta")
_SHORT_FORMS = {"full": "full_attention", "sliding": "sliding_attention"}
_ROPE_THETA = 500_000.0

_TINY: dict[str, Any] = {
    "model_type": "muse_spark_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0,
    "residual_gate_temperature": 0.3,
    "routed_scaling_factor": 1.0,
    "bos_token_id": 0,
    "eos_token_id": None,
}


def tiny_config(**overrides: Any) -> DecoderConfig:
    """A decoder of six layers, 64 wide, in the released model's layer pattern.

    Args:
        overrides: fields of config.json. `layer_types`, `mlp_layer_types` and `layer_rope_theta`
            take a list, or one value for all layers; attention kinds also as "full" and
            "sliding". What is left out follows: the released pattern for as many layers (full
            attention on every fourth from the last), no RoPE on full layers, all layers sparse.

    Raises:
        ConfigError: an override that the config does not have or that does not fit.
    """
    return override_config(_TINY, **overrides)


def override_config(base: DecoderConfig | dict[str, Any], **overrides: Any) -> DecoderConfig:
    """`base` with some fields changed, as `tiny_config` takes them."""
    fields = dict(base) if isinstance(base, dict) else base.to_dict()
    if "eos_token_ids" in overrides:
        overrides["eos_token_id"] = list(overrides.pop("eos_token_ids")) or None
    changes_layers = overrides.keys() & {"num_hidden_layers", *_PER_LAYER}
    fields |= overrides
    if isinstance(base, dict) or changes_layers:
        _fill_layers(fields, overrides)
    return DecoderConfig.from_dict(fields, where="tiny_config")


def _fill_layers(fields: dict[str, Any], given: dict[str, Any]) -> None:
    """The three lists, from what was given of them."""
    num_layers = fields["num_hidden_layers"]
    kinds = given.get("layer_types") or [
        "full" if (num_layers - 1 - layer) % 4 == 0 else "sliding" for layer in range(num_layers)
    ]
    kinds = [_SHORT_FORMS.get(kind, kind) for kind in _spread(kinds, num_layers)]
    rotary = given.get("layer_rope_theta")
    if rotary is None:
        rotary = [0.0 if kind == "full_attention" else _ROPE_THETA for kind in kinds]
    thetas = _spread(rotary, num_layers)
    fields["layer_types"] = kinds
    fields["layer_rope_theta"] = thetas
    fields["mlp_layer_types"] = _spread(given.get("mlp_layer_types") or "sparse", num_layers)
    base = next((theta for theta in thetas if theta > 0), _ROPE_THETA)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": base}


def _spread(value: Any, num_layers: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * num_layers
