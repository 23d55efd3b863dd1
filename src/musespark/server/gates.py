"""What a request must pass before anything reads it: host name, API key, and a bounded body.

Plain ASGI, so that a body is counted while it arrives and nothing of a refused request is kept.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from musespark.server.errors import ApiError

# The chat page and the health checks hold no secrets, and load balancers have no key.
_OPEN_PATHS = ("/", "/health", "/health/live", "/health/ready")
_OPEN_PREFIX = "/page/"

# How programs on this machine address it.
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")

_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)


def header(scope: Scope, name: bytes) -> str:
    """The first header called `name` (lower case), or an empty string."""
    return raw_header(scope, name).decode("latin-1")


def raw_header(scope: Scope, name: bytes) -> bytes:
    """The same as it was sent."""
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


class HostGate:
    """Refuses host names that the server was not told about.

    A web page anywhere may point its own domain's address at 127.0.0.1 and then talk to a server
    there as if it were its own. Only the host name gives that away.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """With nothing in `allowed`, every name is let through."""
        self._app, self._allowed = app, frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._allowed or self._is_allowed(scope):
            await self._app(
                scope, receive, _with_headers(send) if scope["type"] == "http" else send
            )
            return
        error = ApiError(
            421,
            f"The host name {header(scope, b'host')!r} is not served here. Start the server with "
            "--allowed-host, or with an API key.",
        )
        await error.response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        host = header(scope, b"host").lower()
        name = host if host.endswith("]") else host.rsplit(":", 1)[0]
        return name in self._allowed


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
        await send(message)

    return send_with_headers


class KeyGate:
    """Asks for `Authorization: Bearer KEY` wherever the model or its use can be seen."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        """Without keys everyone is let through."""
        self._app = app
        # Digests are of one length, so that the comparison below tells nothing about the key's.
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or self._may_pass(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return True
        scheme, _, key = raw_header(scope, b"authorization").partition(b" ")
        given = _digest(key.strip())
        # All keys are compared, in constant time each.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyGate:
    """Reads the whole body before the application runs, up to a size and within a time."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_seconds: float) -> None:
        self._app, self._max_bytes, self._max_seconds = app, max_bytes, max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        try:
            self._check_head(scope)
            body = await self._read(receive)
        except ApiError as error:
            # What is left of the body is not read, so the connection cannot be used again.
            error.headers["Connection"] = "close"
            await error.response()(scope, receive, send)
            return
        if body is not None:  # None: the client left while sending
            await self._app(scope, _replay(body, receive), send)

    def _check_head(self, scope: Scope) -> None:
        length = header(scope, b"content-length")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        kind = header(scope, b"content-type").partition(";")[0].strip().lower()
        # Other types can be sent by any web page without asking this server first.
        if length != "0" and kind != "application/json":
            raise ApiError(
                415, f"The body must be JSON: send 'Content-Type: application/json', not {kind!r}."
            )

    async def _read(self, receive: Receive) -> bytes | None:
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._max_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise self._too_large()
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                408, f"The body did not arrive within {self._max_seconds:g} seconds."
            ) from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes.")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` once, and then whatever else comes: a disconnect."""
    waiting = [body]

    async def replaying_receive() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replaying_receive
