"""One folder of safetensors files as a table of named tensors, read lazily.

Everything that can be wrong with the files is found when they are opened, from their headers and
sizes alone, before a byte of a weight is read. This room knows the file format and nothing about
what the tensors mean.
"""

import json
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from musespark.checkpoint.header import DOWNLOAD_AGAIN, TensorInfo, read_header, unreadable
from musespark.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Lets Linux map a file larger than its memory writably; named in Python's mmap only since 3.13.
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0

_PICKLED_ENDINGS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHOWN_PROBLEMS = 20


class CheckpointReader:
    """The tensors of a checkpoint folder, by name. Reads may run in many threads at once."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorInfo]) -> None:
        """Use `CheckpointReader.open`."""
        self.folder = folder
        self._tensors = dict(tensors)
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._closed = False

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Vet the headers of every file of the checkpoint in `folder`; reads no weights.

        Raises:
            CheckpointError: no checkpoint there, a damaged or missing file, or an index that
                disagrees with its shards; names the file or tensor and what to do.
        """
        folder = Path(folder)
        index_path = folder / INDEX_FILE
        single_path = folder / SINGLE_FILE
        if index_path.exists():
            weight_map = _read_index(index_path)
            if single_path.exists() and SINGLE_FILE not in weight_map.values():
                raise CheckpointError(
                    f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}, which does not list "
                    "it. One of the two is left from an earlier save: delete that one."
                )
            return cls(folder, _read_shards(folder, weight_map))
        if single_path.exists():
            return cls(folder, {info.name: info for info in read_header(single_path)})
        raise _nothing_to_read(folder)

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._tensors))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def info(self, name: str) -> TensorInfo:
        """What the header says about `name`; CheckpointError if there is no such tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.folder}: holds no tensor named {name!r}.") from None

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors handed out so far: of a slice, the slice's own."""
        return self._bytes_read

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or the block of it that `index` cuts out.

        A view of the mapped file, not a copy: its bytes come in as it is copied into place, and
        only those of the block. It stays valid after `close`.

        Args:
            name: the tensor.
            index: one slice with step 1 per leading dimension; the others are taken whole.

        Raises:
            CheckpointError: no such tensor.
            ValueError: a slice that the tensor does not have, or a closed reader.
        """
        info = self.info(name)
        cuts = resolve_index(index, info.shape)
        tensor = _view_block(self._mapped(info.file), info, cuts)
        with self._lock:
            self._bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        """Let go of the files. Tensors already handed out keep theirs mapped."""
        with self._lock:
            self._closed = True
            # No mmap.close(): it would pull the memory from under tensors still in use.
            self._maps.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mapped(self, path: Path) -> mmap.mmap:
        with self._lock:
            if self._closed:
                raise ValueError("the checkpoint reader is closed")
            if path not in self._maps:
                try:
                    with path.open("rb") as file:
                        # Writable, since torch wants it so; private, so that nothing ever
                        # reaches the file.
                        self._maps[path] = mmap.mmap(
                            file.fileno(),
                            0,
                            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                            prot=mmap.PROT_READ | mmap.PROT_WRITE,
                        )
                except OSError as error:
                    raise unreadable(path, error) from None
            return self._maps[path]


def resolve_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The (start, stop) that `index` cuts from each dimension of `shape`.

    Raises:
        ValueError: more slices than dimensions, a step, or bounds outside the dimension.
    """
    if len(index) > len(shape):
        raise ValueError(f"{len(index)} slices for a tensor of shape {shape}")
    cuts = [(0, size) for size in shape]
    for dim, part in enumerate(index):
        start = 0 if part.start is None else part.start
        stop = shape[dim] if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= shape[dim]:
            raise ValueError(f"{part} does not cut dimension {dim} of shape {shape}")
        cuts[dim] = (start, stop)
    return cuts


def _view_block(data: mmap.mmap, info: TensorInfo, cuts: list[tuple[int, int]]) -> Tensor:
    if any(start == stop for start, stop in cuts):
        return torch.empty([stop - start for start, stop in cuts], dtype=info.dtype)
    row_bytes = info.num_bytes // info.shape[0] if info.shape else info.num_bytes
    first, last = cuts[0] if cuts else (0, 1)
    rows = torch.frombuffer(
        data,
        dtype=torch.uint8,
        count=(last - first) * row_bytes,
        offset=info.offset + first * row_bytes,
    )
    if info.offset % info.dtype.itemsize:
        rows = rows.clone()  # The format promises no alignment; torch's kernels assume it.
    block = rows.view(info.dtype).view((last - first, *info.shape[1:]) if cuts else ())
    for dim, (start, stop) in enumerate(cuts[1:], start=1):
        block = block.narrow(dim, start, stop - start)
    return block


def _read_index(path: Path) -> dict[str, str]:
    """The index's weight_map: tensor name -> file name."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}. {DOWNLOAD_AGAIN}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: has no weight_map, the table of tensor names and files. {DOWNLOAD_AGAIN}"
        )
    for name, file in weight_map.items():
        # A plain file name: an index must not reach outside its folder.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to be in {file!r}, which is not the name of a "
                "file in that folder."
            )
    return weight_map


def _read_shards(folder: Path, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (folder / file).exists()]:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} shards listed in {INDEX_FILE} missing: "
            f"{_listed(missing)}. Download them again, into the same folder."
        )
    tensors: dict[str, TensorInfo] = {}
    problems: dict[str, str] = {}
    for file in files:
        for info in read_header(folder / file):
            if (other := tensors.get(info.name)) is not None:
                problems[info.name] = f"is in two shards, {other.file.name} and {file}"
            elif info.name not in weight_map:
                problems[info.name] = f"is in {file}, but not in the index"
            tensors[info.name] = info
    for name, file in weight_map.items():
        if (found := tensors.get(name)) is None:
            problems[name] = f"is listed for {file}, but is in no shard"
        elif found.file.name != file and name not in problems:
            problems[name] = f"is listed for {file}, but is in {found.file.name}"
    if problems:
        lines = [f"{name!r} {problem}" for name, problem in problems.items()]
        raise CheckpointError(
            f"{folder / INDEX_FILE}: disagrees with the shards: {_listed(lines, '; ')}. "
            "The files stem from different saves: download or write all of them again."
        )
    return tensors


def _nothing_to_read(folder: Path) -> CheckpointError:
    if not folder.exists():
        return CheckpointError(f"{folder}: no such folder.")
    if not folder.is_dir():
        return CheckpointError(f"{folder}: is a file. Give the folder that holds {SINGLE_FILE}.")
    files = sorted(path.name for path in folder.iterdir())
    looked_for = f"neither {SINGLE_FILE} nor {INDEX_FILE}"
    if others := [file for file in files if file.endswith(".safetensors")]:
        return CheckpointError(
            f"{folder}: holds {looked_for}, but {_listed(others)}. Shards need their index file: "
            f"download it too. A single file must be called {SINGLE_FILE}."
        )
    if pickled := [file for file in files if file.endswith(_PICKLED_ENDINGS)]:
        return CheckpointError(
            f"{folder}: holds only pickled weights ({_listed(pickled)}). Unpickling can run any "
            "code, so nothing is ever unpickled here. If you trust the files, convert them with "
            'transformers: `MuseSparkForConditionalGeneration.from_pretrained("...", '
            'use_safetensors=False).save_pretrained("...")`, which writes safetensors.'
        )
    return CheckpointError(
        f"{folder}: no weights there: {looked_for}. Is it the folder of a checkpoint?"
    )


def _listed(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(items[:_SHOWN_PROBLEMS])
    left_out = len(items) - _SHOWN_PROBLEMS
    return f"{shown}{separator}and {left_out} more" if left_out > 0 else shown
