"""Ranks as processes of this machine."""

import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from musespark.config.parallel import Parallelism
from musespark.engine.async_client import AsyncEngineClient
from musespark.engine.thread_client import BuildEngine
from musespark.executor.group import RankGroup
from musespark.executor.rank import BuildPart, RankTask, build_alone, run_rank
from musespark.executor.world import Place


class LocalRank:
    """A process of this machine."""

    host = "127.0.0.1"

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def how_it_ended(self) -> str:
        self.process.join(timeout=2.0)
        code = self.process.exitcode
        if code is None:
            return "has closed its connection"
        return f"has ended by signal {-code}" if code < 0 else f"has ended with code {code}"

    def end(self, seconds: float) -> None:
        self.process.join(timeout=seconds)
        self.process.kill()
        self.process.join()


class LocalLauncher:
    """Starts one process per rank, each with the GPU of its number."""

    def __init__(
        self,
        build: BuildPart,
        parallelism: Parallelism,
        *,
        device_type: str = "cpu",
        max_queue_len: int = 1024,
    ) -> None:
        """`build` is called in the new processes, so it must be something to import, or a
        functools.partial of that; `max_queue_len` is each replica's."""
        self._build, self._parallelism = build, parallelism
        self._device_type, self._max_queue_len = device_type, max_queue_len

    def start(self) -> Sequence[LocalRank]:
        return [self._start(rank) for rank in range(self._parallelism.world_size)]

    def stop(self) -> None:
        """There is nothing else to free."""

    def _start(self, rank: int) -> LocalRank:
        task = RankTask(
            build=self._build,
            parallelism=self._parallelism,
            place=Place(rank, device_index=rank, ranks_here=self._parallelism.world_size),
            device_type=self._device_type,
            max_queue_len=self._max_queue_len,
        )
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_run_process, args=(theirs, task), name=f"musespark-rank-{rank}"
        )
        process.start()
        theirs.close()  # or its end would stay open when the process ends
        return LocalRank(process, mine)


def _run_process(front: Connection, task: RankTask) -> None:
    """The new process."""
    # These reach every process of a terminal or a service; the front decides what they mean, and
    # this one ends when the front does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended_well = run_rank(front, task)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by the interpreter's end: that takes seconds with PyTorch in it, and would wait for
    # whatever inside of libraries waits for other ranks.
    os._exit(0 if ended_well else 1)


def start_process_client(build: BuildEngine, *, max_queue_len: int = 1024) -> AsyncEngineClient:
    """An engine in a new process; call it from a running asyncio loop, then await `wait_ready()`.

    Args:
        build: makes the engine, in the new process, so it must be something to import, or a
            functools.partial of that.
        max_queue_len: requests that may wait.
    """
    alone = functools.partial(build_alone, build)
    launcher = LocalLauncher(alone, Parallelism(), max_queue_len=max_queue_len)
    return AsyncEngineClient(lambda deliver: RankGroup(launcher, Parallelism(), deliver))
