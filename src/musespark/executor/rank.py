"""What a rank's process does: meet the others, build its share, then serve or follow.

It is connected to the front that started it. When the front goes, the rank ends, whatever it is in
the middle of; when the rank fails, its last message says how.
"""

import contextlib
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Protocol

from musespark.checkpoint.load import Progress
from musespark.config.parallel import Parallelism
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine
from musespark.engine.loop import EngineLoop
from musespark.engine.messages import (
    Failed,
    FromRank,
    Hosting,
    Join,
    Loaded,
    Loading,
    Shutdown,
    Stopped,
    ToRank,
)
from musespark.engine.thread_client import BuildEngine, EngineLink
from musespark.engine.wire import decode, encode
from musespark.errors import MuseSparkError
from musespark.executor.store import Store, host_store, reach_store
from musespark.executor.world import Place, World, join_world

# How long a rank may take to end by itself once its front has gone.
_ORPHAN_SECONDS = 3.0
# Seconds between two reports of how far loading is.
_LOADING_PERIOD = 0.2


@dataclass(frozen=True, slots=True)
class Driver:
    """A rank with an engine."""

    engine: Engine
    info: EngineInfo
    end: Callable[[], None]
    """Lets the other ranks of its replica go, and what was recorded here."""
    num_bytes: int = 0
    """Memory that it holds."""


@dataclass(frozen=True, slots=True)
class Follower:
    """A rank without one."""

    follow: Callable[[], None]
    """Runs what its driver sends until there is no more, then lets what was recorded here go."""
    num_bytes: int = 0


class BuildPart(Protocol):
    """Makes a rank's share of a model; something to import, or a functools.partial of that."""

    def __call__(self, world: World, *, progress: Progress | None = None) -> Driver | Follower:
        """Load weights and make caches, in agreement with the other ranks."""
        ...


@dataclass(frozen=True, slots=True)
class RankTask:
    """All that a rank's process is told at its start."""

    build: BuildPart
    parallelism: Parallelism
    place: Place
    device_type: str = "cpu"
    max_queue_len: int = 1024


def build_alone(build: BuildEngine, world: World, *, progress: Progress | None = None) -> Driver:
    """A `BuildPart` of an engine that needs no other ranks."""
    del world, progress
    engine, info = build()
    return Driver(engine, info, end=lambda: None)


def run_rank(front: Connection, task: RankTask) -> bool:
    """Live as a rank; returns whether it ended well, when its last message is on its way."""
    line = _FrontLine(front, task.place.rank)
    try:
        _live(task, line)
    except MuseSparkError as error:
        line.send(Failed(type(error).__name__, str(error)))
    except BaseException as error:  # the rank is lost, whatever it was
        trace = "".join(traceback.format_exception(error))
        line.send(Failed("EngineDeadError", trace))
    else:
        line.send(Stopped())
        return line.close()
    line.close()
    return False


def _live(task: RankTask, line: "_FrontLine") -> None:
    store = _meet(task, line)
    world = join_world(task.parallelism, task.place, store, task.device_type)
    part = task.build(world, progress=line.report_loading if task.place.rank == 0 else None)
    # Keep the garbage collector from walking through all of the model ever after.
    gc.collect()
    gc.freeze()
    line.send(Loaded(part.num_bytes))
    if isinstance(part, Driver):
        loop = EngineLoop(
            part.engine, part.info, line.send, task.max_queue_len, agree=world.any_driver
        )
        line.link.connect(loop)
        loop.run()
        part.end()
    else:
        part.follow()
    world.leave()


def _meet(task: RankTask, line: "_FrontLine") -> Store | None:
    """Where the ranks find each other; rank 0 hosts it."""
    world_size, place = task.parallelism.world_size, task.place
    if world_size == 1:
        return None
    if place.rank == 0:
        store, port = host_store(place.host, world_size)
        line.send(Hosting(port))
        return store
    where = line.joining.get()
    return reach_store(where.host, where.port)


class _FrontLine:
    """The connection to the front, read and written by threads of its own."""

    def __init__(self, front: Connection, rank: int) -> None:
        self.link = EngineLink(self.send)
        self.joining: SimpleQueue[Join] = SimpleQueue()
        self._front, self._rank = front, rank
        self._outgoing: SimpleQueue[FromRank | None] = SimpleQueue()
        self._is_closing = False
        self._told_loading = 0.0
        self._writer = threading.Thread(target=self._write, name="musespark-out", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="musespark-in", daemon=True).start()

    def send(self, message: FromRank) -> None:
        self._outgoing.put(message)

    def report_loading(self, done_bytes: int, total_bytes: int) -> None:
        """A `Progress`."""
        now = time.monotonic()
        if done_bytes == total_bytes or now - self._told_loading > _LOADING_PERIOD:
            self._told_loading = now
            self.send(Loading(done_bytes, total_bytes))

    def close(self) -> bool:
        """Send what is left; returns whether there was time for it."""
        self._is_closing = True
        self._outgoing.put(None)
        self._writer.join(timeout=2.0)
        return not self._writer.is_alive()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message: ToRank = decode(self._front.recv_bytes())  # type: ignore[assignment]
                if isinstance(message, Join):
                    self.joining.put(message)
                else:
                    self.link.send(message)
        if not self._is_closing:  # the front has gone; a rank may wait for another one for ever
            self.link.send(Shutdown())
            time.sleep(_ORPHAN_SECONDS)
            os._exit(1)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._front.send_bytes(encode(message))
