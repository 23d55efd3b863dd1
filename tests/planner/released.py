"""The released model's config, as its config.json would state it."""

from musespark.config.model import DecoderConfig
from musespark.planner.memory import with_format

NUM_LAYERS = 62
KINDS = [
    "full_attention" if (NUM_LAYERS - 1 - i) % 4 == 0 else "sliding_attention" for i in range(62)
]

FIELDS = {
    "model_type": "muse_spark_text",
    "vocab_size": 202048,
    "hidden_size": 8192,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 128,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "intermediate_size": 16384,
    "moe_hidden_size": 4096,
    "moe_intermediate_size": 4096,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "sliding_window": 2048,
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "qk_scale_factor": 5.4730064863875,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0,
    "residual_gate_temperature": 0.3,
    "layer_types": KINDS,
    "layer_rope_theta": [0.0 if kind == "full_attention" else 500_000.0 for kind in KINDS],
    "mlp_layer_types": ["sparse"] * NUM_LAYERS,
}


def released(weight_format="nvfp4") -> DecoderConfig:
    return with_format(DecoderConfig.from_dict(FIELDS), weight_format)
