"""The header of one safetensors file, vetted before anything trusts it.

A file is eight bytes (the header's length), a JSON header (each tensor's dtype, shape and place),
and the tensors' bytes without a gap.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from musespark.errors import CheckpointError

# safetensors' own bound; a length beyond it is read from a file that is something else.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""safetensors' dtype names. E4M3 is the `fn` kind (no infinities): NVFP4's block scales."""

DOWNLOAD_AGAIN = "Download it again."


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says about one tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    num_bytes: int
    offset: int
    """First byte of its data, from the start of the file."""


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, vetted against its size.

    Raises:
        CheckpointError: names the file, what is wrong with it, and what to do.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            header_bytes = int.from_bytes(prefix, "little")
            _check_prefix(path, prefix, header_bytes, file_bytes)
            raw = file.read(header_bytes)
    except OSError as error:
        raise unreadable(path, error) from None
    header = _parse_header(path, raw)
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    tensors = [_parse_entry(path, name, entry, start) for name, entry in header.items()]
    _check_layout(path, tensors, start, file_bytes)
    return tensors


def _check_prefix(path: Path, prefix: bytes, header_bytes: int, file_bytes: int) -> None:
    if prefix == b"version ":
        raise CheckpointError(
            f"{path}: is a Git LFS pointer, not the weights. Run `git lfs pull` in that folder."
        )
    if len(prefix) < 8:
        raise CheckpointError(
            f"{path}: is truncated: {file_bytes} bytes, not even a header. {DOWNLOAD_AGAIN}"
        )
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: is not a safetensors file, or its start is damaged: the header is said to "
            f"be {header_bytes} bytes long. {DOWNLOAD_AGAIN}"
        )
    if 8 + header_bytes > file_bytes:
        raise CheckpointError(
            f"{path}: is truncated: the header is {header_bytes} bytes long, but the file ends "
            f"after {file_bytes}. {DOWNLOAD_AGAIN}"
        )


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice = next(key for key in fields if sum(key == other for other, _ in pairs) > 1)
            raise _corrupt(path, f"{twice!r} is listed twice")
        return fields

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, f"not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _corrupt(path, "not a JSON object")
    return header


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype_name, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, begin, end]
        shape = tuple(shape)
    except (TypeError, KeyError, ValueError):
        raise _corrupt(path, f"tensor {name!r} is described by {entry!r}") from None
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise _corrupt(path, f"tensor {name!r} is described by {entry!r}")
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name!r} is stored as {dtype_name!r}, which this version cannot "
            f"read. It reads {', '.join(DTYPES)}."
        )
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise _corrupt(
            path,
            f"tensor {name!r} takes {num_bytes} bytes by its shape {list(shape)} and dtype "
            f"{dtype_name}, but {end - begin} by its offsets",
        )
    return TensorInfo(name, dtype, shape, path, num_bytes, data_start + begin)


def _check_layout(path: Path, tensors: Iterable[TensorInfo], start: int, file_bytes: int) -> None:
    """The data must fill the file: no gap, no overlap, nothing cut off, nothing left over."""
    position = start
    for info in sorted(tensors, key=lambda info: (info.offset, info.num_bytes)):
        if info.offset != position:
            kind = "overlaps" if info.offset < position else "leaves a gap after"
            raise _corrupt(path, f"tensor {info.name!r} {kind} the tensor before it")
        position += info.num_bytes
    if position > file_bytes:
        raise CheckpointError(
            f"{path}: is truncated: {file_bytes} bytes, but its header describes {position}. "
            f"The download or the copy stopped early. {DOWNLOAD_AGAIN}"
        )
    if position < file_bytes:
        raise _corrupt(path, f"{file_bytes - position} bytes follow the last tensor")


def _corrupt(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: its header is corrupt: {problem}. {DOWNLOAD_AGAIN}")


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The operating system's reason why a file cannot be read."""
    return CheckpointError(f"{path}: cannot be read: {error.strerror or error}.")
