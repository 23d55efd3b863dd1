"""Random checkpoints that behave like trained ones where it matters for comparing numbers.

A random network with large weights is chaotic: rounding noise flips a choice of experts, and the
logits then differ by units. Here every scale is set so that activations stay near 1, the residual
gates let each branch change the stream by about a fifth, the router's logits are well spread, and
no weight is a neutral value (a norm of ones, a bias of zeros) that would hide a mistake.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from musespark.checkpoint.names import CONDITIONAL_GENERATION_PREFIX, LM_HEAD, TEXT_MODEL_PREFIX
from musespark.checkpoint.write import CheckpointWriter
from musespark.config.model import DecoderConfig
from musespark.testing.configs import override_config, tiny_config

# Weights the release keeps in float32, whatever the rest is stored as.
_FLOAT32_ENDINGS = ("residual_gate.gate", "mlp.gate.weight", "e_score_correction_bias")

# Standard deviations of what the weights produce, for unit inputs.
_LOGIT_STD = 3.0
_ROUTER_LOGIT_STD = 1.5
_BIAS_STD = 0.1
_NORM_STD = 0.1
# beta = sigmoid(gate / temperature): about 0.2, between 0.1 and 0.35.
_GATE_MEAN, _GATE_STD = -1.4, 0.3

# The smallest towers transformers accepts, so that it opens the text part without 2 GB of them.
_SMALL_TOWERS: dict[str, Any] = {
    "vision_config": {
        "model_type": "muse_spark_vision",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
    },
    "audio_config": {
        "model_type": "muse_spark_audio",
        "num_hidden_layers": 1,
        "patch_sizes": [2],
        "hidden_sizes": [16],
        "depths": [1],
    },
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
}


def make_checkpoint(
    folder: Path | str,
    config: DecoderConfig | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int | None = None,
    text_only: bool = False,
    per_expert: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random, well-conditioned checkpoint in the Hugging Face layout.

    A tensor's values depend on its name, its shape and `seed` alone, so two configs that differ in
    one layer share the weights of all others.

    Args:
        folder: must not exist, or be empty.
        config: what to write; default: `tiny_config`.
        seed: of the random weights.
        dtype: of all weights but the router's and the residual gates', which are float32.
        max_shard_bytes: shards of at most this size, with an index; None: one file.
        text_only: write config.json without a `text_config`, and the keys without a prefix.
        per_expert: write each expert's three matrices apart.
        overrides: fields of config.json to change, as in `tiny_config`.

    Returns:
        the folder.

    Raises:
        ConfigError: an override that does not fit.
        CheckpointError: the folder holds something.
    """
    folder = Path(folder)
    if config is None:
        config = tiny_config(**overrides)
    elif overrides:
        config = override_config(config, **overrides)
    prefix = TEXT_MODEL_PREFIX if text_only else CONDITIONAL_GENERATION_PREFIX
    with CheckpointWriter(folder, max_shard_bytes=max_shard_bytes) as writer:
        writer.write_json("config.json", config_json(config, dtype, text_only))
        for name, shape in tensor_shapes(config, prefix).items():
            tensor = _random_tensor(name.removeprefix(prefix), shape, config, seed)
            keeps_float32 = name.endswith(_FLOAT32_ENDINGS)
            tensor = tensor.to(torch.float32 if keeps_float32 else dtype)
            for key, value in _split_experts(name, tensor) if per_expert else [(name, tensor)]:
                writer.add(key, value)
    return folder


def tensor_shapes(config: DecoderConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a BF16 checkpoint: key -> shape."""
    D, V = config.hidden_size, config.vocab_size
    H, inner, E = config.moe_hidden_size, config.moe_intermediate_size, config.num_local_experts
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    attention = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (query, D),
        "self_attn.k_proj.weight": (key_value, D),
        "self_attn.v_proj.weight": (key_value, D),
        "self_attn.gate_proj.weight": (query, D),
        "self_attn.o_proj.weight": (D, query),
        "post_attention_residual_gate.gate": (D,),
        "pre_feedforward_layernorm.weight": (D,),
        "post_feedforward_layernorm.weight": (D,),
        "post_feedforward_residual_gate.gate": (D,),
    }
    sparse = {
        "mlp.gate.weight": (E, D),
        "mlp.gate.e_score_correction_bias": (E,),
        "mlp.pre_expert_proj.weight": (H, D),
        "mlp.pre_expert_norm.weight": (H,),
        "mlp.experts.gate_up_proj": (E, 2 * inner, H),
        "mlp.experts.down_proj": (E, H, inner),
        "mlp.experts.post_expert_norm.weight": (H,),
        "mlp.post_expert_proj.weight": (D, H),
    }
    dense = {
        "mlp.gate_proj.weight": (config.intermediate_size, D),
        "mlp.up_proj.weight": (config.intermediate_size, D),
        "mlp.down_proj.weight": (D, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (V, D)}
    for index, layer in enumerate(config.layers):
        for name, shape in (attention | (sparse if layer.mlp == "sparse" else dense)).items():
            shapes[f"{prefix}layers.{index}.{name}"] = shape
    return shapes | {f"{prefix}norm.weight": (D,), LM_HEAD: (V, D)}


def _random_tensor(name: str, shape: tuple[int, ...], config: DecoderConfig, seed: int) -> Tensor:
    """Float32 values of the tensor `name` (without the prefix)."""
    # One 32-bit number: the generator looks at no more.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(shape, generator=generator)
    fan_in = shape[-1]
    if name == "embed_tokens.weight":
        return noise
    if name == "norm.weight":  # the one norm whose weight multiplies as it is
        return 1.0 + _NORM_STD * noise
    if name.endswith("norm.weight"):
        return _NORM_STD * noise
    if name.endswith("residual_gate.gate"):
        return config.residual_gate_temperature * (_GATE_MEAN + _GATE_STD * noise)
    if name.endswith("e_score_correction_bias"):
        return _BIAS_STD * noise
    std = 1.0 / math.sqrt(fan_in)
    if name.endswith("mlp.gate.weight"):
        std *= _ROUTER_LOGIT_STD / config.output_multiplier
    if name == LM_HEAD:
        std *= _LOGIT_STD / config.output_multiplier
    return std * noise


def _split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The keys of single experts that one tensor of all experts stands for."""
    base, _, kind = name.rpartition(".")
    if kind not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        if kind == "down_proj":
            yield f"{base}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{base}.{expert}.gate_proj.weight", gate
            yield f"{base}.{expert}.up_proj.weight", up


def config_json(config: DecoderConfig, dtype: torch.dtype, text_only: bool) -> dict[str, Any]:
    """config.json of a checkpoint: the text part alone, or with the smallest towers around it.

    transformers has a class with an lm_head for the latter only.
    """
    text = config.to_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    if text_only:
        return text
    towers = {
        **_SMALL_TOWERS,
        "audio_config": _SMALL_TOWERS["audio_config"] | {"out_hidden_size": config.hidden_size},
    }
    return {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "dtype": text["dtype"],
        "text_config": text,
        **towers,
    }
