"""The front of a model's ranks: starts them, passes messages on, and ends all when one ends.

The front never waits for a rank: one thread reads what all of them send, another writes. A process
that ends, however it ends, closes its connection, and the reader sees that at once; so a rank that
dies is noticed although the others wait for it in the middle of a step and would wait for ever.
"""

import atexit
import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Protocol

from musespark.checkpoint.load import Progress
from musespark.config.parallel import Parallelism
from musespark.engine.async_client import Deliver
from musespark.engine.messages import (
    Failed,
    FromRank,
    Hosting,
    Join,
    Loaded,
    Loading,
    Ready,
    Shutdown,
    Stopped,
    ToEngine,
    ToRank,
)
from musespark.engine.wire import decode, encode
from musespark.errors import MuseSparkError
from musespark.executor.replicas import Replicas
from musespark.parallel.mesh import place_on_mesh

# After the first rank has failed: time for the others to tell what they know about it.
_LAST_WORDS_SECONDS = 1.0
# How long ranks that were told to stop may take to end by themselves.
_END_SECONDS = 2.0


class RankProcess(Protocol):
    """A rank's process, seen from its front."""

    @property
    def connection(self) -> Connection:
        """Reads and writes `engine.wire` messages; ends when the process does."""
        ...

    @property
    def host(self) -> str:
        """The address of its machine for the other ranks."""
        ...

    def how_it_ended(self) -> str:
        """For people, such as "has ended by signal 9"."""
        ...

    def end(self, seconds: float) -> None:
        """Give it so long to end by itself, then kill it."""
        ...


class Launcher(Protocol):
    """Starts the processes of all ranks."""

    def start(self) -> Sequence[RankProcess]:
        """All of them, in rank order.

        Raises:
            MuseSparkError: they cannot be started.
        """
        ...

    def stop(self) -> None:
        """Free what was taken for them; they have ended, or will have to."""
        ...


class RankGroup:
    """A `Link` to an engine that may be spread over many ranks."""

    def __init__(
        self,
        launcher: Launcher,
        parallelism: Parallelism,
        deliver: Deliver,
        *,
        on_loading: Progress | None = None,
    ) -> None:
        """Return at once; the ranks start in a thread.

        Args:
            launcher: starts them.
            parallelism: how many, and who drives.
            deliver: called with every message, from a thread.
            on_loading: told how far loading is, from a thread.
        """
        self._launcher, self._parallelism, self._deliver = launcher, parallelism, deliver
        self._on_loading = on_loading
        replicas = range(parallelism.data_parallel_size)
        self._driver_ranks = [parallelism.driver_rank(replica) for replica in replicas]
        self._replicas = Replicas(len(replicas))
        self._lock = threading.Lock()
        self._outgoing: SimpleQueue[tuple[int, ToRank] | None] = SimpleQueue()
        self._ready: Ready | None = None
        self._memory: dict[int, int] = {}
        self._is_ending = False
        self.ranks: Sequence[RankProcess] = ()
        """All processes, once they have been started."""
        self._thread = threading.Thread(target=self._run, name="musespark-front", daemon=True)
        self._thread.start()
        # Before multiprocessing's own handler, which waits for the processes.
        atexit.register(self.end)

    def send(self, message: ToEngine) -> None:
        with self._lock:
            for replica in self._replicas.route(message):
                self._outgoing.put((self._driver_ranks[replica], message))

    def kill(self) -> None:
        threading.Thread(target=self.end, name="musespark-kill").start()

    def end(self) -> None:
        """Tell the ranks to stop, and end those that do not in time; returns when all are gone."""
        atexit.unregister(self.end)
        self.send(Shutdown())
        self._end_ranks(_END_SECONDS)

    def _end_ranks(self, seconds: float) -> None:
        self._is_ending = True
        self._outgoing.put(None)
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.end(max(0.0, deadline - time.monotonic()))
        self._launcher.stop()

    def _run(self) -> None:
        try:
            last = self._start_and_listen()
        except MuseSparkError as error:
            last = Failed(type(error).__name__, str(error))
        except Exception:  # a fault of this thread's must not leave anybody waiting
            last = Failed("EngineDeadError", f"The ranks are lost:\n{traceback.format_exc()}")
            self._end_ranks(0)
        if last is not None:
            self._deliver(last)

    def _start_and_listen(self) -> Stopped | Failed | None:
        self.ranks = self._launcher.start()
        if self._is_ending:  # told to, meanwhile
            self._end_ranks(0)
            return None
        # Anew, since handlers run in reverse order, and what the launcher has imported may have
        # handlers that take its ranks away.
        atexit.unregister(self.end)
        atexit.register(self.end)
        threading.Thread(target=self._write, name="musespark-pipe", daemon=True).start()
        return self._listen()

    def _write(self) -> None:
        while (item := self._outgoing.get()) is not None:
            rank, message = item
            with contextlib.suppress(OSError):  # it has ended; the reader tells
                self.ranks[rank].connection.send_bytes(encode(message))

    def _listen(self) -> Stopped | Failed | None:
        """Take messages until all have stopped, or one has failed; None: nobody wants to know."""
        listening = {rank.connection: index for index, rank in enumerate(self.ranks)}
        while listening:
            for connection in wait(list(listening)):
                index = listening[connection]  # type: ignore[index]
                message = _receive(connection)  # type: ignore[arg-type]
                if message is None and self._is_ending:
                    return None
                if message is None or isinstance(message, Failed):
                    del listening[connection]  # type: ignore[arg-type]
                    return self._fail(listening, index, message)
                if isinstance(message, Stopped):
                    del listening[connection]  # type: ignore[arg-type]
                else:
                    self._take(index, message)
        return Stopped()

    def _take(self, index: int, message: FromRank) -> None:
        if isinstance(message, Hosting):
            host = self.ranks[index].host
            for other in range(len(self.ranks)):
                if other != index:
                    self._outgoing.put((other, Join(host, message.port)))
        elif isinstance(message, Loading):
            if self._on_loading is not None:
                self._on_loading(message.done_bytes, message.total_bytes)
        elif isinstance(message, Loaded):
            self._memory[index] = message.num_bytes
            self._deliver_ready()
        else:
            with self._lock:
                joined = self._replicas.join(self._driver_ranks.index(index), message)
            if isinstance(joined, Ready):
                self._ready = joined
                self._deliver_ready()
            elif joined is not None:
                self._deliver(joined)

    def _deliver_ready(self) -> None:
        """Once all replicas serve and every rank has told what it holds."""
        if self._ready is not None and len(self._memory) == len(self.ranks):
            memory = tuple(self._memory[index] for index in range(len(self.ranks)))
            info = dataclasses.replace(
                self._ready.info, layout=self._parallelism.layout_name, memory_bytes=memory
            )
            self._deliver(Ready(info))

    def _fail(self, listening: dict[Connection, int], index: int, message: Failed | None) -> Failed:
        """End all ranks; say what is known about the first one's failure, and what others say."""
        found = {index: message}
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while listening and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(listening), left):
                other = listening[connection]  # type: ignore[index]
                word = _receive(connection)  # type: ignore[arg-type]
                if word is None or isinstance(word, Failed):
                    found[other] = word
                    del listening[connection]  # type: ignore[arg-type]
        endings = {rank: self.ranks[rank].how_it_ended() for rank in found if found[rank] is None}
        self._end_ranks(0)
        for word in found.values():
            if word is not None and word.error != "EngineDeadError":
                return word  # one of ours: it says what to do, and others say the same
        return Failed("EngineDeadError", self._describe(found, endings))

    def _describe(self, found: dict[int, Failed | None], endings: dict[int, str]) -> str:
        if len(self.ranks) == 1:
            word = found[0]
            return (
                f"The engine's process {endings[0]}."
                if word is None
                else f"The engine died:\n{word.message}"
            )
        # Who has ended without a word is the likeliest cause of what the others complain about.
        lines = [f"The engine died, and its {len(self.ranks)} ranks were ended."]
        lines += [f"{self._name(rank)} {how}." for rank, how in endings.items()]
        lines += [
            f"{self._name(rank)} failed:\n{word.message}"
            for rank, word in found.items()
            if word is not None
        ]
        return "\n".join(lines)

    def _name(self, rank: int) -> str:
        mesh = place_on_mesh(self._parallelism, rank)
        place = f"tensor {mesh.tensor.rank}, stage {mesh.pipeline.rank}, replica {mesh.data.rank}"
        return f"Rank {rank} ({place})"


def _receive(connection: Connection) -> FromRank | None:
    """The next message; None at the end."""
    try:
        return decode(connection.recv_bytes())  # type: ignore[return-value]
    except (EOFError, OSError):
        return None
