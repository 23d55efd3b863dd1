"""Write a checkpoint folder in the layout that `shards` reads, tensor by tensor.

A folder appears whole or not at all: everything is written into a sibling folder, which takes the
target's name at the very end.
"""

import json
import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from musespark.checkpoint.header import DTYPES
from musespark.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from musespark.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What makes text of token ids, and how to sample them: copied along with the weights."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Data starts at a multiple of 8, which suits every dtype; readers then need no copy.
_ALIGNMENT = 8


class CheckpointWriter:
    """Writes one folder; a context manager.

        with CheckpointWriter(folder, max_shard_bytes=5_000_000_000) as writer:
            writer.write_json("config.json", config)
            for name, tensor in ...:
                writer.add(name, tensor)

    Left by an exception, it takes back all it wrote and the folder is as it was before.
    """

    def __init__(
        self, folder: Path | str, *, max_shard_bytes: int | None = None, overwrite: bool = False
    ) -> None:
        """Start a checkpoint in `folder`.

        Args:
            folder: must not exist, or be empty.
            max_shard_bytes: a shard is written when the next tensor would take it past this; None:
                one file. As much is held in memory (but not of tensors mapped from a file).
            overwrite: replace a folder that exists, at the very end.

        Raises:
            CheckpointError: the folder holds something, or cannot be written.
        """
        self.folder = Path(folder).absolute()
        self._overwrite = overwrite
        self._max_shard_bytes = max_shard_bytes
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._pending: list[tuple[str, Tensor]] = []
        self._pending_bytes = 0
        self._total_bytes = 0
        self._refuse_occupied()
        self._staging = self.folder.with_name(
            f".{self.folder.name}.unfinished-{secrets.token_hex(4)}"
        )
        try:
            self._staging.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written: {error.strerror or error}."
            ) from None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor. It is kept until its shard is full: do not change it afterwards."""
        if name in self._names:
            raise ValueError(f"{name!r} is written twice")
        if tensor.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name!r}: {tensor.dtype} has no place in safetensors files")
        num_bytes = tensor.numel() * tensor.element_size()
        limit = self._max_shard_bytes
        if self._pending and limit is not None and self._pending_bytes + num_bytes > limit:
            self._flush()
        self._names.add(name)
        self._pending.append((name, tensor.detach()))
        self._pending_bytes += num_bytes
        self._total_bytes += num_bytes

    def write_json(self, file_name: str, content: dict[str, Any]) -> None:
        """Write a JSON file beside the weights: config.json, hf_quant_config.json."""
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (self._staging / file_name).write_text(text + "\n", encoding="utf-8")

    def copy_tokenizer(self, source: Path | str) -> tuple[str, ...]:
        """Copy what the folder `source` has of the tokenizer's files; returns their names."""
        present = tuple(name for name in TOKENIZER_FILES if (Path(source) / name).exists())
        for name in present:
            shutil.copyfile(Path(source) / name, self._staging / name)
        return present

    def finish(self) -> None:
        """Write what is left and give the folder its name. The context manager calls it."""
        if self._pending or not self._shards:
            self._flush()
        if len(self._shards) == 1:
            self._shard_path(0).rename(self._staging / SINGLE_FILE)
        else:
            weight_map: dict[str, str] = {}
            for index, names in enumerate(self._shards):
                file_name = f"model-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"
                self._shard_path(index).rename(self._staging / file_name)
                weight_map |= dict.fromkeys(names, file_name)
            self.write_json(
                INDEX_FILE,
                {
                    "metadata": {"total_size": self._total_bytes},
                    "weight_map": dict(sorted(weight_map.items())),
                },
            )
        self._put_in_place()

    def discard(self) -> None:
        """Take back all that was written."""
        self._pending.clear()
        shutil.rmtree(self._staging, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            self.discard()  # After finish there is nothing left to discard.

    def _shard_path(self, index: int) -> Path:
        return self._staging / f"shard-{index:05d}.part"

    def _flush(self) -> None:
        path = self._shard_path(len(self._shards))
        try:
            with path.open("wb") as file:
                _write_shard(file, self._pending)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: cannot be written: {error.strerror or error}."
            ) from None
        self._shards.append([name for name, _ in self._pending])
        self._pending, self._pending_bytes = [], 0

    def _refuse_occupied(self) -> None:
        if self.folder.is_file():
            raise CheckpointError(f"{self.folder}: is a file. Name a folder to write.")
        if not self._overwrite and self.folder.exists() and any(self.folder.iterdir()):
            raise CheckpointError(
                f"{self.folder}: is not empty. Name a new folder, or empty this one first."
            )

    def _put_in_place(self) -> None:
        self._refuse_occupied()
        if not self.folder.exists():
            self._staging.rename(self.folder)
            return
        replaced = self._staging.with_name(f"{self._staging.name}-replaced")
        self.folder.rename(replaced)
        try:
            self._staging.rename(self.folder)
        except BaseException:
            replaced.rename(self.folder)
            raise
        shutil.rmtree(replaced)


def _write_shard(file: BinaryIO, tensors: list[tuple[str, Tensor]]) -> None:
    """One safetensors file: the header's length, the header, each tensor's bytes."""
    # Wide dtypes first keeps every tensor aligned to its own size.
    ordered = sorted(tensors, key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in ordered:
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    file.write(len(raw).to_bytes(8, "little"))
    file.write(raw)
    for _, tensor in ordered:
        if tensor.numel():
            flat = tensor.cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)
