"""The asyncio side of an engine that runs elsewhere: streams, refusals, death, shutting down.

How messages travel is the business of a `Link`: see thread_client and musespark.executor.group.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Protocol

from musespark.engine.client import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
    OutputStream,
)
from musespark.engine.delta_stream import DeltaStream
from musespark.engine.messages import (
    Abort,
    Accepted,
    Failed,
    ForgetPrefixes,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Stopped,
    Submit,
    ToEngine,
    error_of,
)
from musespark.errors import (
    EngineDeadError,
    EngineNotReadyError,
    MuseSparkError,
    RequestError,
)

# How long an engine that was told to stop may take to finish the step it is in.
_STOP_SECONDS = 5.0


class Link(Protocol):
    """A started engine at the other end of two one-way channels."""

    def send(self, message: ToEngine) -> None:
        """Send; never waits long, and does nothing once the engine is gone."""
        ...

    def kill(self) -> None:
        """End the engine if it has not ended, and free what it held. Does not wait for it."""
        ...


Deliver = Callable[[FromEngine], None]
"""What a link calls, from any thread, with each message of its engine."""

StartLink = Callable[[Deliver], Link]
"""Starts an engine. The last message delivered is `Stopped` or `Failed`, however it ends."""


class AsyncEngineClient:
    """An `EngineClient` over any link."""

    def __init__(self, start: StartLink) -> None:
        """Start the engine; needs a running asyncio loop, and belongs to it."""
        self._loop = asyncio.get_running_loop()
        # The engine knows requests by numbers of this client's own: a caller may use a name again
        # while the engine still talks of the request that had it before.
        self._streams: dict[str, DeltaStream] = {}
        self._number_of: dict[str, str] = {}
        self._numbers = itertools.count()
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._death: MuseSparkError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._state = EngineState.STARTING
        self._settled, self._gone = asyncio.Event(), asyncio.Event()  # ready or dead; dead
        self._link = start(self._deliver)

    # --- EngineClient

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def is_healthy(self) -> bool:
        return self._state is EngineState.READY

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineNotReadyError("The engine is still loading the model.")
        return self._info

    async def wait_ready(self) -> None:
        await self._settled.wait()
        if self._death is not None:
            raise self._death

    async def generate(self, request: EngineRequest) -> OutputStream:
        self._check_open()
        if request.request_id in self._number_of:
            raise RequestError(
                f"A request named {request.request_id!r} runs already: names must differ."
            )
        number = str(next(self._numbers))
        stream = DeltaStream(number, request, self._loop.create_future(), self._leave)
        self._streams[number] = stream
        self._number_of[request.request_id] = number
        self._idle.clear()
        self._link.send(Submit(dataclasses.replace(request, request_id=number)))
        try:
            await stream.accepted
        except BaseException:  # refused, dead, or nobody waits any more
            await stream.aclose()
            raise
        return stream

    async def abort(self, request_id: str, index: int | None = None) -> None:
        if (number := self._number_of.get(request_id)) is not None:
            self._link.send(Abort(number, index))

    def stats(self) -> EngineStats:
        return self._stats

    async def reset_prefix_cache(self) -> None:
        self._check_open()
        self._link.send(ForgetPrefixes())

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        if self._state is not EngineState.DEAD:
            if self._state is EngineState.READY and drain_seconds > 0:
                self._state = EngineState.DRAINING
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), drain_seconds)
            self._link.send(Shutdown())
            if self._state is not EngineState.STARTING:  # loading is not worth waiting for
                self._state = EngineState.DRAINING
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), _STOP_SECONDS)
            self._die(EngineDeadError("The engine was shut down."))
        self._link.kill()

    # --- messages

    def _deliver(self, message: FromEngine) -> None:
        """Take a message, in whichever thread reads them."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._receive, message)

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            self._stats = message.stats.following(self._stats)
            for output in message.outputs:
                self._pass_on(output)
        elif isinstance(message, Accepted):
            if (stream := self._streams.get(message.request_id)) is not None:
                stream.accept()
        elif isinstance(message, Refused):
            if (stream := self._streams.get(message.request_id)) is not None:
                stream.fail(error_of(message))
        elif isinstance(message, Ready):
            self._info, self._state = message.info, EngineState.READY
            self._settled.set()
        else:
            self._take_last(message)

    def _pass_on(self, output: EngineOutput) -> None:
        if (stream := self._streams.get(output.request_id)) is not None:
            stream.push(output)
            if stream.is_finished:
                self._remove(stream)

    def _take_last(self, message: Failed | Stopped) -> None:
        self._link.kill()
        self._gone.set()
        if isinstance(message, Stopped):
            self._die(EngineDeadError("The engine was shut down."))
        else:
            self._die(error_of(message))

    def _die(self, error: MuseSparkError) -> None:
        self._state, self._death = EngineState.DEAD, self._death or error
        self._settled.set()
        self._fail_streams(error)

    def _fail_streams(self, error: MuseSparkError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
            self._remove(stream)

    # --- streams

    def _check_open(self) -> None:
        if self._state is EngineState.DEAD:
            raise EngineDeadError(str(self._death))
        if self._state is not EngineState.READY:
            doing = "shutting down" if self._state is EngineState.DRAINING else "still starting"
            raise EngineNotReadyError(f"The engine is {doing}. Try again later.")

    def _leave(self, stream: "DeltaStream") -> None:
        """A reader has left its stream."""
        if stream.number in self._streams:
            self._remove(stream)
            self._link.send(Abort(stream.number))

    def _remove(self, stream: "DeltaStream") -> None:
        del self._streams[stream.number], self._number_of[stream.name]
        if not self._streams:
            self._idle.set()
