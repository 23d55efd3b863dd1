"""Processes that run a function on every rank of a small world, over gloo.

They start once for a whole test session, since importing torch takes longer than most tests. Every
call gets process groups of its own. A rank that fails or hangs fails the call at once: all
processes are killed then, and the next call starts new ones. A rank that hangs says where first.
"""

import faulthandler
import importlib
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Long enough for a busy machine; a test that needs longer is too heavy.
_SECONDS = 120


class WorkerError(AssertionError):
    """A rank raised, died or hung; says which, and with what traceback."""


class Workers:
    """A pool of processes, started when they are first needed."""

    def __init__(self, seconds: float = _SECONDS, backend: str = "gloo") -> None:
        """`backend`: gloo on a CPU; with nccl, each rank has the GPU of its number."""
        self._seconds, self._backend = seconds, backend
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on ranks 0 to world_size - 1: what each returned.

        The function must be importable by its name; arguments and results are pickled.
        """
        self._grow(world_size)
        self._calls += 1
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="musespark-")
        store = Path(self._folder.name) / f"store-{self._calls}"
        for rank in range(world_size):
            place = (function.__module__, function.__qualname__)
            world = (rank, world_size, str(store), self._seconds, self._backend)
            self._pipes[rank].send((world, place, args))
        try:
            return self._collect(world_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _grow(self, world_size: int) -> None:
        while len(self._processes) < world_size:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def _collect(self, world_size: int) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + self._seconds
        while len(results) < world_size:
            missing = [rank for rank in range(world_size) if rank not in results]
            pipes = [self._pipes[rank] for rank in missing]
            ready = wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerError(f"ranks {missing} hang")
            for rank, pipe in zip(missing, pipes, strict=True):
                if pipe not in ready:
                    continue
                try:
                    error, result = pipe.recv()
                except (EOFError, ConnectionError):
                    raise WorkerError(f"rank {rank} died") from None
                if error is not None:
                    raise WorkerError(f"rank {rank}:\n{error}")
                results[rank] = result
        return [results[rank] for rank in range(world_size)]


def _work(pipe: Connection) -> None:
    """One process: run what comes in until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            (rank, world_size, store, seconds, backend), (module, name), args = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.9 * seconds)
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=seconds),
            )
            function = getattr(importlib.import_module(module), name)
            answer: tuple[str | None, Any] = (None, function(rank, *args))
            dist.destroy_process_group()
        except Exception:
            answer = (traceback.format_exc(), None)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)
