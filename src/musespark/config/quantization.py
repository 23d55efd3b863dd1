"""How a checkpoint's routed experts are quantized (ModelOpt's NVFP4), read and vetted.

Two places tell it: `quantization_config` in config.json, or the file hf_quant_config.json, whose
content sits under the key "quantization". The list of excluded layers is read, never assumed.
"""

import fnmatch
from dataclasses import dataclass
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
        return any(
            fnmatch.fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")
            for pattern in self.exclude_modules
        )


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
    if "quantization" in reader:  # hf_quant_config.json
        producer = reader.take("producer", dict, {})
        method = producer.get("name", "modelopt")
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
