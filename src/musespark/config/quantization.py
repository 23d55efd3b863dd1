"""How a checkpoint's routed experts are quantized (ModelOpt's NVFP4), read and vetted.

Two places tell it: `quantization_config` in config.json, or the file hf_quant_config.json, whose
content sits under the key "quantization". The list of excluded layers is read, never assumed.
"""

import fnmatch
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from musespark.config.strict import FieldReader
from musespark.errors import ConfigError

NVFP4_GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """NVFP4 experts, one e4m3 scale per 16 inputs, and the modules left in BF16."""

    exclude_modules: tuple[str, ...] = ()
    """Wildcard patterns of module names whose weights are not quantized."""
    kv_cache_dtype: str | None = None
    """What the checkpoint suggests for the KV cache: "fp8_e4m3" or None."""

    def excludes(self, module: str) -> bool:
        """Whether the module of this dotted name (no `.weight`) is left in BF16."""
        names, wildcards = _split_patterns(self.exclude_modules)
        parts = module.split(".")
        around = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return not names.isdisjoint(around) or any(
            fnmatch.fnmatchcase(module, pattern) for pattern in wildcards
        )

    def excludes_experts(self, layer_index: int, num_experts: int) -> bool:
        """Whether the routed experts of this layer are left in BF16.

        Tools name a layer by the module tree they saw: that of the conditional-generation model in
        either order of its parts, of the text model, or of a text model with a head. A list that
        names any of these means this layer. It may name the experts' module, something around it,
        what is inside it by a wildcard or by the names of its tensors, or all experts one by one.

        Raises:
            ConfigError: some of the layer's expert weights are excluded and some are not.
        """
        modules = [f"{tree}layers.{layer_index}.mlp.experts" for tree in _MODULE_TREES]
        if any(self.excludes(module) for module in modules):
            return True
        if not any(".experts" in pattern for pattern in self.exclude_modules):
            return False
        partly = False
        for inside in (_STACKED, _one_by_one(num_experts)):
            counts = [
                sum(self.excludes(f"{module}.{name}") for name in inside) for module in modules
            ]
            if max(counts) == len(inside):
                return True
            partly |= max(counts) > 0
        if partly:
            raise ConfigError(
                f"quantization: of the experts of layer {layer_index}, some are excluded from "
                "NVFP4 and some are not, which is not supported. Exclude the whole module "
                f"{modules[0]!r}, or nothing in it."
            )
        return False


@lru_cache(maxsize=8)
def _split_patterns(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """(plain names, patterns with a wildcard): lists of all experts one by one get long."""
    wildcards = tuple(pattern for pattern in patterns if any(mark in pattern for mark in "*?["))
    return frozenset(patterns) - set(wildcards), wildcards


_MODULE_TREES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_STACKED = ("gate_up_proj", "down_proj")


def _one_by_one(num_experts: int) -> list[str]:
    projections = ("gate_proj", "up_proj", "down_proj")
    return [f"{expert}.{name}" for expert in range(num_experts) for name in projections]


def read_quantization(fields: Any, where: str) -> QuantizationConfig:
    """The quantization that `fields` describe, in either of ModelOpt's two layouts.

    Args:
        fields: `quantization_config` of config.json, or the whole of hf_quant_config.json.
        where: the file (and field) named by errors.

    Raises:
        ConfigError: another method, algorithm or group size than NVFP4 with groups of 16.
    """
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: must be an object, found {fields!r}.")
    reader = FieldReader(fields, where)
    if "quantization" in reader:  # hf_quant_config.json, which is ModelOpt's whoever wrote it
        method = "modelopt"
        reader = FieldReader(reader.take("quantization", dict), f"{where}: quantization")
    else:
        method = reader.take("quant_method", str)
    if method != "modelopt":
        raise reader.error("quant_method", f"only 'modelopt' is supported, found {method!r}.")
    algorithm = reader.take("quant_algo", str)
    if algorithm != "NVFP4":
        raise reader.error("quant_algo", f"only 'NVFP4' is supported, found {algorithm!r}.")
    for group_size in _group_sizes(reader):
        if group_size != NVFP4_GROUP_SIZE:
            raise reader.error(
                "group_size", f"NVFP4 has one scale per 16 inputs, found {group_size}."
            )
    excluded = reader.take("ignore", list, reader.take("exclude_modules", list, []))
    if not all(isinstance(pattern, str) for pattern in excluded):
        raise reader.error("ignore", f"must be a list of module names, found {excluded!r}.")
    return QuantizationConfig(
        exclude_modules=tuple(excluded), kv_cache_dtype=_kv_cache_dtype(reader)
    )


def _group_sizes(reader: FieldReader) -> list[Any]:
    """Every group size stated: at the top, or per group of layers."""
    sizes = [reader.take("group_size", int, NVFP4_GROUP_SIZE)]
    for name, group in reader.take("config_groups", dict, {}).items():
        if not isinstance(group, dict):
            raise reader.error("config_groups", f"{name!r} must be an object, found {group!r}.")
        weights = group.get("weights")
        sizes += [weights.get("group_size", NVFP4_GROUP_SIZE)] if isinstance(weights, dict) else []
    return sizes


def _kv_cache_dtype(reader: FieldReader) -> str | None:
    algorithm = reader.take("kv_cache_quant_algo", str, None)
    scheme = reader.take("kv_cache_scheme", dict, None)
    if algorithm is None and scheme is not None:
        is_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        algorithm = "FP8" if is_fp8 else str(scheme)
    if algorithm not in (None, "FP8"):
        raise reader.error(
            "kv_cache_quant_algo", f"only 'FP8' or none is supported, found {algorithm!r}."
        )
    return "fp8_e4m3" if algorithm else None
