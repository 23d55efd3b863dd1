"""Running the web server: it listens at once, loads behind that, and ends in bounded time."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from musespark.config.server import ServerConfig
from musespark.errors import ConfigError, EngineDeadError
from musespark.server.supervisor import Supervisor

# Clients keep connections for their next request; a server that closes first makes them fail.
_KEEP_ALIVE_SECONDS = 65
# After the engine has aborted what still ran, responses end by themselves.
_GRACE_SECONDS = 5


class DrainingServer(uvicorn.Server):
    """A web server that, once told to stop, ends its requests through the engine."""

    def __init__(self, app: ASGIApp, config: ServerConfig, supervisor: Supervisor) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(config.shutdown_seconds) + _GRACE_SECONDS,
            )
        )
        self._shutdown_seconds, self._supervisor = config.shutdown_seconds, supervisor

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first signal drains, the second does not wait."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let running ones finish for a while, abort the rest."""
        draining = asyncio.create_task(self._supervisor.stop(self._shutdown_seconds))
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await draining
        await self._supervisor.stop(0)


async def serve(
    server: DrainingServer,
    supervisor: Supervisor,
    *,
    listener: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve until a signal says to stop.

    Args:
        server: the web server.
        supervisor: launches the engine while the health checks can be asked already.
        listener: from `listen`.
        on_ready: called when requests are taken.

    Raises:
        MuseSparkError: the engine cannot be started.
        EngineDeadError: it had died, and there was no other by the time of the signal.
    """
    starting = asyncio.create_task(supervisor.start())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait({starting, serving}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done() and not starting.cancelled() and starting.exception() is None:
        on_ready()
    elif starting.done():
        server.should_exit = True
    await serving
    if starting.done():
        await starting
        if supervisor.death is not None:
            raise EngineDeadError("The server ended without an engine: it had died. See the log.")
    else:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address.

    Raises:
        ConfigError: there is no such address, or it is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"host: cannot listen on {host!r}: {error.strerror}.") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: cannot listen on {host}:{port}: {error.strerror}. Choose another with --port."
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a browser on this machine finds the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # every interface, this machine's own included
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
