"""What a checkpoint holds and what is wrong with it, from its headers alone.

Where loading stops at the first obstacle, this goes on: a damaged shard or an unreadable config is
one line of the report, and everything else is still told.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from musespark.checkpoint.header import TensorInfo, read_header
from musespark.checkpoint.names import find_prefix, is_skipped
from musespark.checkpoint.shards import CheckpointReader
from musespark.config.model import DecoderConfig
from musespark.errors import CheckpointError, ConfigError
from musespark.model.decoder import Decoder

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

PARTS: dict[str, str] = {
    "embedding": r"(.*\.)?embed_tokens\.weight",
    "output projection": r"lm_head\.weight",
    "attention": r".*\.self_attn\..*",
    "router": r".*\.mlp\.gate\..*",
    "pooler and unpooler": r".*\.mlp\.(pre|post)_expert_proj\.weight",
    "experts": r".*\.mlp\.experts\.(?!post_expert_norm).*",
    "dense FFN": r".*\.mlp\.(gate|up|down)_proj\.weight",
    "norms and gates": r"(.*\.)?(\w*norm\.weight|\w*residual_gate\.gate)",
}
"""Parts of the decoder, and the names of their tensors."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One safetensors file."""

    name: str
    num_bytes: int
    num_tensors: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors alike in everything but the numbers in their names."""

    name: str
    """Such as `layers.{0-61}.mlp.gate.weight`."""
    shape: tuple[int, ...]
    dtype: str
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """All that `musespark inspect` shows."""

    folder: str
    files: tuple[FileReport, ...]
    groups: tuple[TensorGroup, ...]
    bytes_by_part: dict[str, int]
    bytes_by_dtype: dict[str, int]
    config: DecoderConfig | None
    attention_pattern: str
    """A letter per layer: s sliding, F full."""
    ffn_pattern: str
    """A letter per layer: B experts in 16 bits, 4 in NVFP4, D dense."""
    problems: tuple[str, ...]
    """What keeps the files from being read, or from being understood."""
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, str]
    """Name -> what is there and what the config asks for."""
    mistyped: dict[str, str]
    skipped: tuple[str, ...]
    """Left unread, knowingly."""

    @property
    def loads(self) -> bool:
        """Whether the text decoder could be loaded."""
        faults = (self.problems, self.missing, self.unexpected, self.misshaped, self.mistyped)
        return not any(faults)

    @property
    def num_bytes(self) -> int:
        """Of all readable tensors."""
        return sum(self.bytes_by_dtype.values())

    @property
    def num_tensors(self) -> int:
        """All readable ones."""
        return sum(group.count for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """As JSON objects."""
        fields = asdict(self)
        totals = {"num_tensors": self.num_tensors, "num_bytes": self.num_bytes}
        return {"loads": self.loads, **totals, **fields}


def inspect_checkpoint(folder: Path) -> CheckpointReport:
    """Read every header in `folder` that can be read; never raises for what is wrong in there."""
    problems: list[str] = []
    try:
        CheckpointReader.open(folder).close()
    except CheckpointError as error:
        problems.append(str(error))
    tensors: dict[str, TensorInfo] = {}
    files = tuple(_read_files(folder, tensors))
    problems += [
        file.problem for file in files if file.problem is not None and file.problem not in problems
    ]
    config = _read_config(folder, problems)
    attention, ffn = _patterns(config, problems)
    fit = _compare(folder, config, tensors, problems)
    by_dtype: defaultdict[str, int] = defaultdict(int)
    by_part: defaultdict[str, int] = defaultdict(int)
    for name, info in tensors.items():
        by_dtype[dtype_name(info.dtype)] += info.num_bytes
        by_part[part_of(name)] += info.num_bytes
    return CheckpointReport(
        folder=str(folder),
        files=files,
        groups=tuple(_group(tensors.values())),
        bytes_by_part=dict(sorted(by_part.items(), key=lambda item: -item[1])),
        bytes_by_dtype=dict(sorted(by_dtype.items(), key=lambda item: -item[1])),
        config=config,
        attention_pattern=attention,
        ffn_pattern=ffn,
        problems=tuple(problems),
        missing=tuple(fit.missing),
        unexpected=tuple(fit.unexpected),
        misshaped=fit.misshaped,
        mistyped=fit.mistyped,
        skipped=tuple(sorted(filter(is_skipped, tensors))),
    )


def part_of(name: str) -> str:
    """Which of `PARTS` a tensor belongs to; "skipped" or "other" if to none."""
    if is_skipped(name):
        return "skipped"
    found = (part for part, pattern in PARTS.items() if re.fullmatch(pattern, name))
    return next(found, "other")


def dtype_name(dtype: torch.dtype) -> str:
    """Without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _read_files(folder: Path, tensors: dict[str, TensorInfo]) -> Iterator[FileReport]:
    """Every safetensors file there, readable or not; fills `tensors`."""
    for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        infos: list[TensorInfo] = []
        problem = None
        try:
            infos = read_header(path)
        except CheckpointError as error:
            problem = str(error)
        tensors.update((info.name, info) for info in infos)
        num_bytes = path.stat().st_size if path.exists() else 0
        yield FileReport(path.name, num_bytes, len(infos), problem)


def _read_config(folder: Path, problems: list[str]) -> DecoderConfig | None:
    try:
        return DecoderConfig.from_folder(folder)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _patterns(config: DecoderConfig | None, problems: list[str]) -> tuple[str, str]:
    if config is None:
        return "", ""
    attention = "".join("F" if layer.sliding_window is None else "s" for layer in config.layers)
    try:
        return attention, "".join(_ffn_letter(config, index) for index in range(len(attention)))
    except ConfigError as error:
        problems.append(str(error))
        return attention, ""


def _ffn_letter(config: DecoderConfig, index: int) -> str:
    quantization = config.quantization
    if config.layers[index].mlp == "dense":
        return "D"
    if quantization is None or quantization.excludes_experts(index, config.num_local_experts):
        return "B"
    return "4"


@dataclass(frozen=True, slots=True)
class _Fit:
    """How the tensors on disk differ from those of the config's model."""

    missing: list[str]
    unexpected: list[str]
    misshaped: dict[str, str]
    mistyped: dict[str, str]


def _compare(
    folder: Path,
    config: DecoderConfig | None,
    tensors: Mapping[str, TensorInfo],
    problems: list[str],
) -> _Fit:
    fit = _Fit([], [], {}, {})
    if config is None or not tensors:
        return fit
    try:
        prefix = find_prefix(CheckpointReader(folder, tensors))
        # The meta device: names and shapes of a model of any size, without its memory.
        decoder = Decoder(config, dtype=torch.bfloat16, device="meta")
        wanted = {slot.name: slot for slot in decoder.weight_slots(prefix, tensors.__contains__)}
    except (CheckpointError, ConfigError) as error:
        if str(error) not in problems:
            problems.append(str(error))
        return fit
    fit.missing.extend(sorted(wanted.keys() - tensors.keys(), key=_natural))
    others = tensors.keys() - wanted.keys()
    fit.unexpected.extend(sorted((name for name in others if not is_skipped(name)), key=_natural))
    for name in sorted(wanted.keys() & tensors.keys(), key=_natural):
        slot, info = wanted[name], tensors[name]
        if info.shape != slot.shape:
            fit.misshaped[name] = f"{list(info.shape)}, the config makes it {list(slot.shape)}"
        if info.dtype not in slot.dtypes:
            accepted = " or ".join(map(dtype_name, slot.dtypes))
            fit.mistyped[name] = f"{dtype_name(info.dtype)}, it must be {accepted}"
    return fit


def _group(infos: Iterable[TensorInfo]) -> Iterator[TensorGroup]:
    """Tensors with the same shape and dtype, and names that differ in numbers alone."""
    families: defaultdict[tuple[str, tuple[int, ...], torch.dtype], list[TensorInfo]]
    families = defaultdict(list)
    for info in sorted(infos, key=lambda info: _natural(info.name)):
        families[_NUMBER.sub("#", info.name), info.shape, info.dtype].append(info)
    for (_, shape, dtype), members in families.items():
        numbers = [_NUMBER.findall(info.name) for info in members]
        ranges = [number_ranges(map(int, column)) for column in zip(*numbers, strict=True)]
        texts = iter(text if text.isdigit() else f"{{{text}}}" for text in ranges)
        yield TensorGroup(
            name=_NUMBER.sub(lambda _, texts=texts: next(texts), members[0].name),  # type: ignore[misc]
            shape=shape,
            dtype=dtype_name(dtype),
            count=len(members),
            num_bytes=sum(info.num_bytes for info in members),
        )


def number_ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
