"""Fill a model's weight slots from a checkpoint: each byte wanted is read once and put in place.

The whole match is checked before the first read, so a load either starts with all it needs or
reports all it lacks. Tensors are views of the mapped files; `WeightSlot.store` copies them to
where they belong, so there is never a second copy of the model in memory.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch

from musespark.checkpoint.match import check_slots
from musespark.checkpoint.shards import CheckpointReader, resolve_index
from musespark.parallel.shard import WeightSlot

# Reading is bound by the disk or by memory bandwidth: a few threads keep either busy.
_DEFAULT_WORKERS = 8


class Progress(Protocol):
    """Told how far a load has come. Called from several threads, one at a time."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """`done_bytes` only grows; the last call has done_bytes == total_bytes."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did."""

    num_tensors: int
    num_bytes: int
    seconds: float
    skipped: tuple[str, ...]
    """Keys of the files that were left unread, knowingly."""


def load_weights(
    slots: Iterable[WeightSlot],
    reader: CheckpointReader,
    *,
    progress: Progress | None = None,
    max_workers: int | None = None,
    elsewhere: Callable[[str], bool] | None = None,
) -> LoadReport:
    """Read each slot's part of its tensor and hand it to the slot's `store`.

    Args:
        slots: what the model wants. `store` is called from several threads at once, under
            no_grad, with a view of the mapped file: it must copy, not keep.
        reader: the files.
        progress: told the bytes stored so far and in all.
        max_workers: threads that read; default: 8, or fewer if there are fewer tensors.
        elsewhere: for one rank of many: whether a key that no slot wants is another rank's.

    Raises:
        CheckpointError: every missing, unexpected, wrongly shaped or wrongly typed tensor, in
            one error, before anything is read.
    """
    started = time.perf_counter()
    # In the order of the files, so that disks read forward.
    wanted = sorted(slots, key=lambda slot: _place(slot, reader))
    skipped = check_slots(wanted, reader, elsewhere)
    total = sum(_num_bytes(slot, reader) for slot in wanted)
    tally = _Tally(total, progress)
    stop = threading.Event()

    def fill(slot: WeightSlot) -> None:
        if stop.is_set():
            return
        try:
            with torch.no_grad():
                slot.store(reader.read(slot.name, slot.index))
            tally.add(_num_bytes(slot, reader))
        except BaseException:
            stop.set()
            raise

    workers = max(1, min(max_workers or _DEFAULT_WORKERS, len(wanted)))
    with ThreadPoolExecutor(workers, thread_name_prefix="load") as pool:
        try:
            futures = [pool.submit(fill, slot) for slot in wanted]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:
            stop.set()  # After a failure or Ctrl-C, what has not begun never does.
    return LoadReport(len(wanted), total, time.perf_counter() - started, tuple(skipped))


class _Tally:
    """Adds up bytes from many threads and passes the sum on."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()
        self.add(0)

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _place(slot: WeightSlot, reader: CheckpointReader) -> tuple[str, int]:
    if slot.name not in reader:
        return ("", 0)
    info = reader.info(slot.name)
    return (str(info.file), info.offset)


def _num_bytes(slot: WeightSlot, reader: CheckpointReader) -> int:
    num_bytes: int = reader.info(slot.name).dtype.itemsize
    for start, stop in resolve_index(slot.index, slot.shape):
        num_bytes *= stop - start
    return num_bytes
