"""An engine in a thread of this process, for tests and notebooks: no pipe, no second interpreter.

Python code of both sides shares one interpreter lock, so a busy server slows the engine down; serve
in other processes: see musespark.executor.
"""

import threading
import traceback
from collections.abc import Callable

from musespark.engine.async_client import AsyncEngineClient, Deliver, Link
from musespark.engine.client import EngineInfo
from musespark.engine.engine import Engine
from musespark.engine.loop import EngineLoop
from musespark.engine.messages import Failed, Shutdown, Stopped, ToEngine
from musespark.errors import MuseSparkError

BuildEngine = Callable[[], tuple[Engine, EngineInfo]]
"""Loads a model and makes its engine."""


def serve_engine(build: BuildEngine, max_queue_len: int, link: "EngineLink") -> None:
    """Build an engine and serve it; whatever goes wrong becomes the last message."""
    try:
        engine, info = build()
        loop = EngineLoop(engine, info, link.deliver, max_queue_len)
        link.connect(loop)
        loop.run()
        link.deliver(Stopped())
    except MuseSparkError as error:
        link.deliver(Failed(type(error).__name__, str(error)))
    except BaseException as error:  # the engine is lost, whatever it was
        trace = "".join(traceback.format_exception(error))
        link.deliver(Failed("EngineDeadError", f"The engine died:\n{trace}"))


class EngineLink:
    """Sends to the loop's inbox; messages from before the loop exists wait."""

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self._loop: EngineLoop | None = None
        self._early: list[ToEngine] = []
        self._lock = threading.Lock()

    def connect(self, loop: EngineLoop) -> None:
        """Give the loop what came so far, and everything from now on."""
        with self._lock:
            self._loop = loop
            for message in self._early:
                loop.inbox.put(message)

    def send(self, message: ToEngine) -> None:
        with self._lock:
            if self._loop is None:
                self._early.append(message)
            else:
                self._loop.inbox.put(message)

    def kill(self) -> None:
        """A thread cannot be killed: it ends by itself after the step that it is in."""
        self.send(Shutdown())


def start_thread_client(build: BuildEngine, *, max_queue_len: int = 1024) -> AsyncEngineClient:
    """An engine in a thread; call it from a running asyncio loop, then await `wait_ready()`."""

    def start(deliver: Deliver) -> Link:
        link = EngineLink(deliver)
        arguments = (build, max_queue_len, link)
        threading.Thread(
            target=serve_engine, args=arguments, name="musespark-engine", daemon=True
        ).start()
        return link

    return AsyncEngineClient(start)
