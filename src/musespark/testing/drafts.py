"""Random DSpark drafts for any target: well conditioned, and no help at all."""

import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from musespark.checkpoint.write import CheckpointWriter
from musespark.config.draft import MODEL_TYPE, DraftConfig
from musespark.config.model import DecoderConfig

# Standard deviations of what the weights produce, for unit inputs.
_LOGIT_STD = 3.0
_MARKOV_STD = 2.0
_NORM_STD = 0.1
# sigmoid(gate / 0.3): about 0.2.
_GATE_MEAN, _GATE_STD = -0.42, 0.1


def draft_fields(target: DecoderConfig, **overrides: Any) -> dict[str, Any]:
    """config.json of a small draft of two layers for `target`, as the released draft is built.

    Args:
        target: what it proposes tokens for.
        overrides: fields of config.json to change.
    """
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["MuseSparkDSparkForCausalLM"],
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "ffn_dim_multiplier": 1.5,
        "rms_norm_eps": 1e-5,
        "rms_post_norm_eps": 1e-8,
        "norm_affine": True,
        "post_norm_affine": False,
        "norm_zero_centered_gamma": True,
        "post_norm_gain_center_type": "one",
        "output_norm_gain_center_type": "zero",
        "use_qk_norm": True,
        "use_attn_o_norm": True,
        "use_attn_o_gate": True,
        "use_residual_gate": True,
        "use_ffn_learnable_scales": True,
        "residual_dtype": "fp32",
        "use_rope": True,
        "rope_theta": 10_000.0,
        "every_n_layers_nope": None,
        "global_attn_cfg": [16],
        "use_sqrt_attn_scaling": True,
        "metap": {"use_metap": True, "metap_mode": "sp", "base_width": 16},
        "output_soft_cap_temp": 20.0,
        "target_layer_ids": sorted({0, target.num_hidden_layers - 1}),
        "target_hidden_size": target.hidden_size,
        "mask_token_id": 1,
        "block_size": 7,
        "markov_rank": 8,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        **overrides,
    }


def make_draft(
    folder: Path | str,
    target: DecoderConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """Write a random draft for `target`, which proposes tokens that mean nothing.

    Args:
        folder: must not exist, or be empty.
        target: what it proposes tokens for.
        seed: of the random weights. With a reduced vocabulary (`draft_vocab_size`), the draft's
            tokens are spread over the target's.
        dtype: of all weights but the residual gates', which are float32.
        overrides: fields of config.json to change.

    Returns:
        the folder.

    Raises:
        ConfigError: an override that does not fit.
        CheckpointError: the folder holds something.
    """
    fields = draft_fields(target, **overrides)
    config = DraftConfig.from_dict(fields, where="make_draft")
    config.check_target(target)
    with CheckpointWriter(Path(folder)) as writer:
        writer.write_json("config.json", fields)
        for name, shape in draft_shapes(config, target).items():
            tensor = _random_tensor(name, shape, config, seed)
            writer.add(name, tensor.to(torch.float32 if name.endswith(".gate") else dtype))
        step = target.vocab_size // config.draft_vocab_size
        writer.add("d2t", (step - 1) * torch.arange(config.draft_vocab_size))
    return Path(folder)


def draft_shapes(config: DraftConfig, target: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every floating-point tensor of a draft's checkpoint: key -> shape."""
    D, inner, rank = config.hidden_size, config.intermediate_size, config.markov_rank
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, D),
        "self_attn.k_proj.weight": (key_value, D),
        "self_attn.v_proj.weight": (key_value, D),
        "self_attn.o_proj.weight": (D, query),
        "feed_forward.gate_proj.weight": (inner, D),
        "feed_forward.up_proj.weight": (inner, D),
        "feed_forward.down_proj.weight": (D, inner),
    }
    if config.use_attn_o_gate:
        layer["self_attn.o_gate_proj.weight"] = (query, D)
    if config.norm_affine:
        layer |= {"self_attn.pre_qkv_proj_norm.weight": (D,), "pre_ffn_norm.weight": (D,)}
    if config.post_norm_affine:
        layer["post_attn_norm.weight"] = (D,)
    if config.post_norm_affine or config.use_ffn_learnable_scales:
        layer["post_ffn_norm.weight"] = (D,)
    if config.use_residual_gate:
        layer |= {"add_attn.gate": (D,), "add_ffn.gate": (D,)}
    taps = len(config.target_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, taps * config.target_hidden_size),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
        "lm_head.weight": (config.draft_vocab_size, D),
    }
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if rank:
        shapes["markov_head.markov_w1.weight"] = (target.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.enable_confidence_head:
        width = D + (rank if config.confidence_head_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], config: DraftConfig, seed: int) -> Tensor:
    """Float32 values of the tensor `name`."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if name.endswith(".gate"):
        return _GATE_MEAN + _GATE_STD * noise
    if name.endswith("norm.weight"):
        return _norm_center(name, config) + _NORM_STD * noise
    if name in ("markov_head.markov_w1.weight", "confidence_head.proj.bias"):
        return noise
    std = 1.0 / math.sqrt(shape[-1])
    if name == "lm_head.weight":
        std *= _LOGIT_STD / config.output_multiplier
    if name == "markov_head.markov_w2.weight":
        std *= _MARKOV_STD / config.output_multiplier
    return std * noise


def _norm_center(name: str, config: DraftConfig) -> float:
    """What a norm's weight must be near for a gain near 1."""
    if name == "norm.weight":
        return 1.0 - config.output_norm_center
    if name == "hidden_norm.weight":
        return 1.0
    if "pre_" in name:
        return 1.0 - config.pre_norm_center
    layer = int(name.split(".")[1])
    return 1.0 - config.gain_center(2 * layer + (1 if "post_attn" in name else 2))
