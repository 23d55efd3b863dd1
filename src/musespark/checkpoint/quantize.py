"""Write a BF16 checkpoint again with its experts in NVFP4, layer by layer.

No more than one layer's experts are in memory at a time. The target appears whole or not at all
(see `write`). Gate and up get a global scale each: one for both would cost the smaller half its
precision, since they differ by up to 10x.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from musespark.checkpoint.calibrate import InputScales
from musespark.checkpoint.load import Progress
from musespark.checkpoint.modelopt import (
    QUANT_FILE,
    excluded_modules,
    hf_quant_config,
    quantization_config,
)
from musespark.checkpoint.names import find_prefix
from musespark.checkpoint.quantize_layer import LayerError, PlainExperts, quantize_layer
from musespark.checkpoint.shards import INDEX_FILE, CheckpointReader
from musespark.checkpoint.write import TOKENIZER_FILES, CheckpointWriter
from musespark.config.model import DecoderConfig
from musespark.config.strict import read_json_object
from musespark.errors import ConfigError
from musespark.ops.nvfp4 import GROUP_SIZE, ScaleChoice

# What is quantized of a layer's experts: stacked, or one by one.
_EXPERT_WEIGHT = re.compile(r"gate_up_proj|down_proj|\d+\.(gate|up|down)_proj\.weight")
# A shard holds a layer, or this much where layers are small.
_MIN_SHARD_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What a run did."""

    layers: tuple[LayerError, ...]
    """Of every quantized layer."""
    source_bytes: int
    target_bytes: int


def quantize_checkpoint(
    source: Path | str,
    target: Path | str,
    *,
    exclude_layers: Collection[int] | None = None,
    scale_choice: ScaleChoice = "mse",
    input_scales: Mapping[int, InputScales] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> QuantizeReport:
    """Quantize the experts of a checkpoint to NVFP4 in ModelOpt's layout.

    Args:
        source: folder of the BF16 checkpoint.
        target: folder to write; must not exist, or be empty.
        exclude_layers: layers whose experts stay as they are; None: the first and the last.
        scale_choice: how block scales are found: by least squared error, or from the maximum.
        input_scales: by layer, as `calibrate` measures them; None: written as uncalibrated.
        progress: told the bytes read so far and in all.
        overwrite: replace a target that exists, at the very end.

    Raises:
        ConfigError: the source is quantized already, or cannot be.
        CheckpointError: files are missing, damaged, or hold weights that are not finite.
    """
    source = Path(source)
    config = DecoderConfig.from_folder(source)
    if exclude_layers is None:
        exclude_layers = (0, config.num_hidden_layers - 1)
    chosen = _chosen_layers(config, source, exclude_layers)
    with CheckpointReader.open(source) as reader:
        layout = _Layout(reader, find_prefix(reader), chosen)
        total = sum(reader.info(name).num_bytes for name in reader.names())
    kept = [index for index in _sparse_layers(config) if index not in chosen]
    excluded = excluded_modules(config, layout.prefix, kept)
    tally = _Tally(total, progress)
    input_scales = input_scales or {}
    shard_bytes = max(_MIN_SHARD_BYTES, _packed_layer_bytes(config))
    errors: list[LayerError] = []
    with CheckpointWriter(target, max_shard_bytes=shard_bytes, overwrite=overwrite) as writer:
        _write_files(source, writer, excluded)
        for group, names in layout.kept_names.items():
            with CheckpointReader.open(source) as reader:
                for name in names:
                    writer.add(name, reader.read(name))
                    tally.add(reader.info(name).num_bytes)
                if group is not None and group in chosen:
                    scales = input_scales.get(group)
                    experts = PlainExperts(reader, layout.experts_prefix(group), config)
                    errors.append(
                        quantize_layer(group, experts, writer, scales, scale_choice, tally.add)
                    )
    written = sum(path.stat().st_size for path in Path(target).glob("*.safetensors"))
    return QuantizeReport(tuple(errors), total, written)


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layer indices from "first,last,3,5-7"; "none" and "" stand for none.

    Raises:
        ConfigError: anything else, or a layer that is not there.
    """
    named = {"first": 0, "last": num_layers - 1}
    layers: set[int] = set()
    for word in (part.strip() for part in text.split(",")):
        if word in ("", "none"):
            continue
        first, dash, last = word.partition("-")
        try:
            start = named[first] if first in named else int(first)
            stop = start if not dash else named[last] if last in named else int(last)
        except ValueError:
            raise ConfigError(
                f"exclude-layers: {word!r} is no layer. Write numbers from 0, ranges such as 3-5, "
                "first, last or none, with commas between them."
            ) from None
        if not 0 <= start <= stop < num_layers:
            raise ConfigError(
                f"exclude-layers: {word!r} is not within this model's layers 0 to {num_layers - 1}."
            )
        layers.update(range(start, stop + 1))
    return tuple(sorted(layers))


def _sparse_layers(config: DecoderConfig) -> list[int]:
    return [index for index, layer in enumerate(config.layers) if layer.mlp == "sparse"]


def _chosen_layers(config: DecoderConfig, source: Path, excluded: Collection[int]) -> set[int]:
    if config.quantization is not None:
        raise ConfigError(
            f"{source}: is quantized already. Quantize the BF16 checkpoint it was made from."
        )
    chosen = set(_sparse_layers(config)) - set(excluded)
    if not chosen:
        raise ConfigError(
            f"{source}: no layer is left to quantize: of {config.num_hidden_layers} layers "
            f"{len(_sparse_layers(config))} have experts, and these are all excluded. Exclude "
            "fewer layers."
        )
    for name in ("moe_hidden_size", "moe_intermediate_size"):
        if (size := getattr(config, name)) % GROUP_SIZE:
            raise ConfigError(
                f"{source}: {name}: NVFP4 has one scale per {GROUP_SIZE} inputs, so it must be a "
                f"multiple of {GROUP_SIZE}, found {size}."
            )
    return chosen


def _packed_layer_bytes(config: DecoderConfig) -> int:
    weights = 3 * config.num_local_experts * config.moe_hidden_size * config.moe_intermediate_size
    return weights // 2 + weights // GROUP_SIZE


class _Layout:
    """Which of the source's tensors are copied, group by group: outside the layers, then each."""

    def __init__(self, reader: CheckpointReader, prefix: str, chosen: set[int]) -> None:
        self.prefix = prefix
        self.kept_names: dict[int | None, list[str]] = {None: []}
        self.kept_names |= {index: [] for index in sorted(chosen)}
        for name in reader.names():
            layer = self._layer_of(name)
            if layer in chosen and self._is_expert_weight(name, layer):
                continue
            self.kept_names.setdefault(layer, []).append(name)

    def experts_prefix(self, layer: int | None) -> str:
        """What the keys of a layer's experts begin with."""
        return f"{self.prefix}layers.{layer}.mlp.experts."

    def _layer_of(self, name: str) -> int | None:
        start = f"{self.prefix}layers."
        number = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
        return int(number) if number.isdigit() else None

    def _is_expert_weight(self, name: str, layer: int | None) -> bool:
        start = self.experts_prefix(layer)
        inside = name.removeprefix(start)
        return inside != name and _EXPERT_WEIGHT.fullmatch(inside) is not None


def _write_files(source: Path, writer: CheckpointWriter, excluded: list[str]) -> None:
    """Everything beside the weights."""
    config: dict[str, Any] = read_json_object(source / "config.json")
    config["quantization_config"] = quantization_config(excluded)
    writer.write_json("config.json", config)
    writer.write_json(QUANT_FILE, hf_quant_config(excluded))
    copied = {
        *writer.copy_tokenizer(source),
        *TOKENIZER_FILES,
        "config.json",
        QUANT_FILE,
        INDEX_FILE,
    }
    for path in sorted(source.glob("*.json")):
        if path.name not in copied:
            writer.write_json(path.name, read_json_object(path))


class _Tally:
    """Bytes read so far."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more have been read."""
        self._done += num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
