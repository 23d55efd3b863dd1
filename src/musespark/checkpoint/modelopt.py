"""What ModelOpt writes about an NVFP4 checkpoint, for every tool that reads that layout."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from musespark.checkpoint.names import CONDITIONAL_GENERATION_PREFIX
from musespark.config.model import DecoderConfig
from musespark.ops.nvfp4 import GROUP_SIZE

QUANT_FILE = "hf_quant_config.json"

_TOWERS = ("vision_tower", "vision_adapter", "vision_projection", "audio_tower")
_NOT_EXPERTS = ("self_attn*", "mlp.gate", "mlp.pre_expert_proj", "mlp.post_expert_proj")


def excluded_modules(config: DecoderConfig, prefix: str, layers: Iterable[int]) -> list[str]:
    """Patterns of the modules that stay as they are.

    Args:
        config: the model.
        prefix: of the decoder's keys in the checkpoint.
        layers: sparse layers whose experts stay in BF16.
    """
    excluded = ["lm_head", f"{prefix}embed_tokens"]
    excluded += [f"{prefix}layers.*.{name}" for name in _NOT_EXPERTS]
    for index, layer in enumerate(config.layers):
        if layer.mlp == "dense":
            excluded.append(f"{prefix}layers.{index}.mlp*")
    excluded += [f"{prefix}layers.{index}.mlp.experts*" for index in sorted(layers)]
    if prefix == CONDITIONAL_GENERATION_PREFIX:
        excluded += [f"model.{tower}*" for tower in _TOWERS]
    return excluded


def quantization_config(excluded: list[str]) -> dict[str, Any]:
    """`quantization_config` of config.json."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP_SIZE}
    return {
        "config_groups": {
            "group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}
        },
        "ignore": excluded,
        "quant_algo": "NVFP4",
        "producer": _producer(),
        "quant_method": "modelopt",
    }


def hf_quant_config(excluded: list[str]) -> dict[str, Any]:
    """The file hf_quant_config.json."""
    return {
        "producer": _producer(),
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP_SIZE,
            "exclude_modules": excluded,
        },
    }


def _producer() -> dict[str, str]:
    # Readers tell the layout by this name; the version says who really wrote it.
    return {"name": "modelopt", "version": f"musespark {version('musespark')}"}
