"""Errors in OpenAI's shape, with the status its clients expect.

400 invalid_request_error   the request can never work; `param` names the field
401 invalid_request_error   no API key, or a wrong one
404, 405, 408, 413, 415     no such model or path; the body is too slow, too large, not JSON
503 server_error            the engine is full, starting, stopping or dead; with Retry-After
500 server_error            a bug here; the traceback is in the server's log only
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from musespark.errors import (
    EngineDeadError,
    EngineError,
    EngineNotReadyError,
    MuseSparkError,
    QueueFullError,
    RequestError,
)

_log = logging.getLogger(__name__)

# Our own messages begin with the field they are about: "messages[0].role: must be ...".
_FIELD = re.compile(r"([a-z_][a-z0-9_.\[\]]*): ")

# Seconds after which it is worth trying again.
_RETRY_AFTER: Mapping[type[EngineError], int] = {
    QueueFullError: 1,
    EngineNotReadyError: 5,
    EngineDeadError: 10,
}
_ENGINE_CODES: Mapping[type[EngineError], str] = {
    QueueFullError: "server_overloaded",
    EngineNotReadyError: "engine_not_ready",
    EngineDeadError: "engine_dead",
}


class ApiError(MuseSparkError):
    """A response with an error status, raised from anywhere in the handling of a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of a stream's last event."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def body_text(self) -> str:
        """The same as text. ASCII only: messages quote what clients sent, and that may be half of
        a surrogate pair, which has no UTF-8 form."""
        return json.dumps(self.body())

    def response(self) -> Response:
        """The whole response."""
        return Response(self.body_text(), self.status, self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The error a client gets to see for `error`. One that is nobody's but ours is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        message = str(error)
        field = _FIELD.match(message)
        return ApiError(400, message, param=field and field[1])
    if isinstance(error, EngineError):
        kind = next((kind for kind in _RETRY_AFTER if isinstance(error, kind)), EngineDeadError)
        retry = {"Retry-After": str(_RETRY_AFTER[kind])}
        return ApiError(503, str(error), code=_ENGINE_CODES[kind], headers=retry)
    _log.error("A request failed.", exc_info=error)
    return ApiError(500, "The server failed to handle this request. Its log says why.")


def _from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """One error out of pydantic's list."""
    # In a union every branch fails; the one that got furthest is the one that was meant.
    worst = max(errors, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    path = [part for part in worst["loc"][1:] if isinstance(part, int) or _is_field(part)]
    context = worst.get("ctx", {})
    if worst["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {context.get('error', worst['msg'])}.")
    if worst["type"] == "field":
        path.append(context["param"])
        return ApiError(400, worst["msg"], param=_join(path), code="unknown_parameter")
    if not path:
        what = worst["msg"].removeprefix("Value error, ")
        if worst["type"] in ("missing", "dict_type", "model_attributes_type", "model_type"):
            what = "The body must be a JSON object."
        return ApiError(400, what)
    name = _join(path)
    code = "missing_required_parameter" if worst["type"] == "missing" else "invalid_value"
    what = worst["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{name}: {what[:1].lower()}{what[1:]}.", param=name, code=code)


def _is_field(part: str) -> bool:
    """Whether part of a path is a field, and not the name of a union's branch."""
    return part.isidentifier() and part not in ("bool", "float", "int", "str")


def _join(path: Sequence[Any]) -> str:
    """`messages[0].role` from its parts."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


class LastResort:
    """Turns a bug into a response, so that the connection can go on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def watching_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, watching_send)
        except Exception as error:
            if has_started:
                raise
            await as_api_error(error).response()(scope, receive, send)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` come out in OpenAI's shape."""

    async def on_validation(_request: Request, error: Exception) -> Response:
        errors = error.errors() if isinstance(error, RequestValidationError) else []
        return _from_validation(errors).response()

    async def on_http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return as_api_error(error).response()
        if error.status_code == 404:
            message = f"There is nothing at {request.url.path}."
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}."
        else:
            message = str(error.detail)
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def on_own(_request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(MuseSparkError, on_own)
    app.add_middleware(LastResort)
