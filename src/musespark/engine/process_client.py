"""An engine in a process of its own, so that neither HTTP nor tokenizing ever delays a step.

On each side a thread reads the pipe all the time, so that the other side never waits for it to be
emptied; the engine also writes from a thread. A process that ends, however it ends, closes its end
of the pipe, which the other side notices at once.
"""

import atexit
import contextlib
import gc
import multiprocessing
import signal
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

from musespark.engine.async_client import AsyncEngineClient, Deliver
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine
from musespark.engine.messages import Failed, FromEngine, Shutdown, Stopped, ToEngine
from musespark.engine.thread_client import BuildEngine, EngineLink, serve_engine
from musespark.engine.wire import decode, encode


def start_process_client(build: BuildEngine, *, max_queue_len: int = 1024) -> AsyncEngineClient:
    """An engine in a new process; call it from a running asyncio loop, then await `wait_ready()`.

    Args:
        build: makes the engine, in the new process, so it must be something to import, or a
            functools.partial of that.
        max_queue_len: requests that may wait.
    """
    return AsyncEngineClient(lambda deliver: ProcessLink(build, max_queue_len, deliver))


class ProcessLink:
    """This side's end of the pipe."""

    def __init__(self, build: BuildEngine, max_queue_len: int, deliver: Deliver) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._outgoing: SimpleQueue[ToEngine | None] = SimpleQueue()
        self.process: BaseProcess = context.Process(
            target=_run_engine, args=(theirs, build, max_queue_len), name="musespark-engine"
        )
        self.process.start()
        theirs.close()  # or its end would stay open when the process ends
        self._deliver = deliver
        for target in (self._read, self._write):
            threading.Thread(target=target, name="musespark-pipe", daemon=True).start()
        # Before multiprocessing's own handler, which waits for the process.
        atexit.register(self._end_process)

    def send(self, message: ToEngine) -> None:
        self._outgoing.put(message)

    def kill(self) -> None:
        atexit.unregister(self._end_process)
        threading.Thread(target=self._end_process, name="musespark-kill").start()

    def _end_process(self) -> None:
        """Let a process that has been told to stop end by itself, or end it."""
        self._outgoing.put(None)
        self.process.join(timeout=1.0)
        self.process.kill()
        self.process.join()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended; the reader tells
            while (message := self._outgoing.get()) is not None:
                self._pipe.send_bytes(encode(message))

    def _read(self) -> None:
        last: FromEngine | None = None
        try:
            while not isinstance(last, Stopped | Failed):
                last = decode(self._pipe.recv_bytes())  # type: ignore[assignment]
                self._deliver(last)  # type: ignore[arg-type]
        except (EOFError, OSError):
            self.process.join(timeout=2.0)
            code = self.process.exitcode
            how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
            self._deliver(Failed("EngineDeadError", f"The engine's process has ended {how}."))
        finally:
            self._pipe.close()


def _run_engine(pipe: Connection, build: BuildEngine, max_queue_len: int) -> None:
    """The new process."""
    # These reach every process of a terminal or a service; the one that serves decides what they
    # mean, and this one ends when the pipe does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    outgoing: SimpleQueue[FromEngine | None] = SimpleQueue()
    link = EngineLink(outgoing.put)
    threading.Thread(target=_read_commands, args=(pipe, link), daemon=True).start()
    writer = threading.Thread(target=_write_messages, args=(pipe, outgoing), daemon=True)
    writer.start()
    serve_engine(lambda: _build_for_good(build), max_queue_len, link)
    outgoing.put(None)
    writer.join(timeout=2.0)
    gc.unfreeze()  # or extension modules complain at exit of what was never collected


def _build_for_good(build: BuildEngine) -> tuple[Engine, EngineInfo]:
    """Build, and keep the garbage collector from walking through all of the model ever after."""
    built = build()
    gc.collect()
    gc.freeze()
    return built


def _read_commands(pipe: Connection, link: EngineLink) -> None:
    try:
        while True:
            link.send(decode(pipe.recv_bytes()))  # type: ignore[arg-type]
    except (EOFError, OSError):  # whom this engine serves is gone
        link.send(Shutdown())


def _write_messages(pipe: Connection, outgoing: "SimpleQueue[FromEngine | None]") -> None:
    with contextlib.suppress(OSError):
        while (message := outgoing.get()) is not None:
            pipe.send_bytes(encode(message))
