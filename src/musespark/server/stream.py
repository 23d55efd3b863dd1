"""Sending what is not finished yet, to clients that may be slow or gone.

Nothing is queued here. A stream takes its next delta only once the last one has been handed to the
connection, and what the engine produces meanwhile is joined on the engine's side: so a slow reader
costs the memory of its own output and holds up nobody.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
# What clients skip. Proxies close connections on which nothing happens, often after a minute.
PING = ": still there\n\n"
PING_SECONDS = 15.0


def event(text: str) -> str:
    """One server-sent event that holds one line of JSON."""
    return f"data: {text}\n\n"


class ClientGoneError(Exception):
    """The client has closed the connection; there is nobody to answer."""


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientGoneError: the client has left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _end(working, watching)


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A response of server-sent events, ended as soon as nobody reads it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        close: Callable[[bool], Awaitable[None]],
        stall_seconds: float,
    ) -> None:
        """`close` is called at the end in any case, with whether all events were sent;
        `stall_seconds` is how long the client may take to take one."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close, self._stall_seconds = events, close, stall_seconds
        self._is_complete = self._is_quiet = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        pinging = asyncio.create_task(self._ping(send))
        try:
            with contextlib.suppress(ClientGoneError):
                await unless_gone(receive, self._write(send))
        finally:
            await _end(pinging)
            await self._close(self._is_complete)

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with contextlib.aclosing(self._events):
                await send(start)
                async for text in self._events:
                    self._is_quiet = False
                    async with asyncio.timeout(self._stall_seconds):
                        await _send_body(send, text, more=True)
            self._is_complete = True
            await _send_body(send, "", more=False)
        except TimeoutError:
            # Returning in the middle of a response makes the web server close the connection.
            _log.warning("A reader took nothing for %g s and was cut off.", self._stall_seconds)

    async def _ping(self, send: Send) -> None:
        """Say something from time to time while the engine is silent."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            if self._is_quiet:
                await _send_body(send, PING, more=True)
            self._is_quiet = True


async def _send_body(send: Send, text: str, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
