"""Keeps an engine running, or knows why there is none."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from musespark.engine.client import EngineClient, EngineState
from musespark.errors import EngineDeadError, EngineNotReadyError, MuseSparkError

_log = logging.getLogger(__name__)

# How soon a death is seen, and so how long health may be wrong at most.
_POLL_SECONDS = 0.1
# Waits between attempts to start again: a crash may be passing, or may come back at once.
_BACKOFF_SECONDS = (0.0, 1.0, 5.0, 30.0)
# An engine that lived so long starts with a clean record.
_STABLE_SECONDS = 300.0


class Supervisor:
    """Launches the engine, watches it, and launches it again if it may."""

    def __init__(self, launch: Callable[[], EngineClient], *, restart: bool) -> None:
        """`launch` starts an engine and returns at once, before it is ready."""
        self._launch, self._restart = launch, restart
        self._is_stopping = False
        self._max_model_len: int | None = None
        self._watch: asyncio.Task[None] | None = None
        self.current: EngineClient | None = None
        self.on_restart: Callable[[], None] = lambda: None
        self.death: MuseSparkError | None = None
        """What the engine died of, until there is another one."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self.current is not None and self.current.is_healthy and not self._is_stopping

    @property
    def is_hopeless(self) -> bool:
        """The engine is dead and will stay so."""
        is_dead = self.current is not None and self.current.state is EngineState.DEAD
        return is_dead and not self._restart and not self._is_stopping

    @property
    def state(self) -> str:
        """For people: what the engine is doing."""
        if self._is_stopping:
            return "stopping"
        return "starting" if self.current is None else str(self.current.state)

    @property
    def max_model_len(self) -> int | None:
        """Prompt and output tokens of one request; None while the model is loading."""
        return self._max_model_len

    def require(self) -> EngineClient:
        """The engine, if it takes requests.

        Raises:
            EngineError: it does not, and why.
        """
        if self._is_stopping:
            raise EngineNotReadyError("The server is shutting down.")
        if self.current is None or self.current.state is EngineState.STARTING:
            raise EngineNotReadyError("The model is still loading.")
        if self.current.state is EngineState.DEAD:
            again = "It is being started again." if self._restart else "The server needs a restart."
            raise EngineDeadError(f"The engine has died. {again}")
        return self.current

    async def start(self) -> None:
        """Launch the engine, and return when it is ready.

        Raises:
            MuseSparkError: it cannot be started.
        """
        self.current = self._launch()
        await self.current.wait_ready()
        self._max_model_len = self.current.info.max_model_len
        self._watch = asyncio.create_task(self._keep())

    async def stop(self, drain_seconds: float) -> None:
        """Let running requests finish for so long, then end the engine."""
        is_dead = self.current is not None and self.current.state is EngineState.DEAD
        if self.current is not None and is_dead and not self._is_stopping and self.death is None:
            await self._log_death(self.current)  # a moment before the next look
        self._is_stopping = True
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self.current is not None:
            await self.current.shutdown(drain_seconds)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        failures, born = 0, loop.time()
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            if self.current is None or self.current.state is not EngineState.DEAD:
                continue
            if loop.time() - born > _STABLE_SECONDS:
                failures = 0
            await self._log_death(self.current)
            if not self._restart:
                _log.error("The engine has died. Restart the server, or use --restart-engine.")
                return
            wait = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
            _log.error("The engine has died; starting it again%s.", f" in {wait:g} s" * bool(wait))
            await asyncio.sleep(wait)
            failures, born = failures + 1, loop.time()
            self.on_restart()
            await self._launch_again()

    async def _log_death(self, engine: EngineClient) -> None:
        try:
            await engine.wait_ready()
        except MuseSparkError as error:
            self.death = error
            _log.error("%s", error)

    async def _launch_again(self) -> None:
        try:
            if self.current is not None:
                await self.current.shutdown()
            self.current = self._launch()
            await self.current.wait_ready()
            self.death = None
            _log.warning("The engine is ready again.")
        except MuseSparkError as error:
            _log.error("The engine could not be started: %s", error)
        except Exception:
            _log.exception("The engine could not be started.")
