"""The web application: which path does what."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Protocol

from fastapi import FastAPI, Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import Response
from starlette.types import ASGIApp

import musespark
from musespark.server import tokens
from musespark.server.chat import ChatJob
from musespark.server.chat_page import page_routes
from musespark.server.completions import CompletionJob
from musespark.server.context import Context
from musespark.server.errors import add_error_handlers
from musespark.server.gates import LOCAL_NAMES, BodyGate, HostGate, KeyGate
from musespark.server.metrics import CONTENT_TYPE, ResponseCounter
from musespark.server.protocol.base import (
    ErrorResponse,
    Health,
    Model,
    ModelList,
    ResponseModel,
)
from musespark.server.protocol.chat import ChatCompletion, ChatRequest
from musespark.server.protocol.completions import Completion, CompletionRequest
from musespark.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from musespark.server.stream import ClientGoneError, EventStream, unless_gone

# For the OpenAPI document only; the key is checked before the application runs.
_Key = Annotated[Any, Security(HTTPBearer(auto_error=False, description="Only if one is set."))]

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse},
    "5XX": {"model": ErrorResponse},
}
# What a client that left before its answer would have been told; nginx made the number known.
_CLIENT_GONE = 499


class _Job(Protocol):
    async def complete(self) -> ResponseModel: ...

    def events(self) -> AsyncGenerator[str, None]: ...

    async def aclose(self) -> None: ...


def build_app(context: Context, api_keys: tuple[str, ...] = ()) -> ASGIApp:
    """The application with everything a request passes on its way in."""
    config = context.config
    api = build_api(context)
    paths = {route.path for route in api.routes if hasattr(route, "path")}
    is_private = config.is_local and not api_keys
    hosts = config.allowed_host or (LOCAL_NAMES if is_private else ())
    app: ASGIApp = BodyGate(api, config.max_body_bytes, config.body_seconds)
    app = KeyGate(app, api_keys)
    app = HostGate(app, hosts)
    return ResponseCounter(app, context.metrics, paths)


def build_api(context: Context) -> FastAPI:
    """The endpoints alone."""
    # Their documentation pages would load scripts from elsewhere.
    api = FastAPI(title="musespark", version=musespark.__version__, docs_url=None, redoc_url=None)
    add_error_handlers(api)
    _add_generation(api, context)
    _add_tokens(api, context)
    _add_models(api, context)
    _add_operation(api, context)
    if not context.config.api_only:
        api.router.routes.extend(page_routes())
    return api


def _add_generation(api: FastAPI, context: Context) -> None:
    stream: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    @api.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ERRORS | stream)
    async def chat_completions(body: ChatRequest, http: Request, _key: _Key) -> Response:
        """Continue a conversation."""
        job = await ChatJob.start(context, body)
        return await _respond(context, http, job, stream=body.stream)

    @api.post("/v1/completions", response_model=Completion, responses=_ERRORS | stream)
    async def completions(body: CompletionRequest, http: Request, _key: _Key) -> Response:
        """Complete prompts as they are."""
        job = await CompletionJob.start(context, body)
        return await _respond(context, http, job, stream=body.stream)


async def _respond(context: Context, http: Request, job: _Job, *, stream: bool) -> Response:
    async def close(is_complete: bool) -> None:
        if not is_complete:
            context.metrics.clients_gone.inc()
        await job.aclose()

    if stream:
        return EventStream(
            job.events(), close=close, stall_seconds=context.config.stream_stall_seconds
        )
    try:
        return _json(await unless_gone(http.receive, job.complete()))
    except ClientGoneError:
        context.metrics.clients_gone.inc()
        return Response(status_code=_CLIENT_GONE)
    finally:
        await job.aclose()


def _json(response: ResponseModel) -> Response:
    return Response(response.to_json(), media_type="application/json")


def _add_tokens(api: FastAPI, context: Context) -> None:
    # In threads: long texts take long, and streams must not wait for them.

    @api.post("/tokenize", response_model=TokenizeResponse, responses=_ERRORS)
    async def tokenize(body: TokenizeRequest, _key: _Key) -> Response:
        """The tokens of a prompt or of a conversation."""
        return _json(await asyncio.to_thread(tokens.tokenize, context, body))

    @api.post("/detokenize", response_model=DetokenizeResponse, responses=_ERRORS)
    async def detokenize(body: DetokenizeRequest, _key: _Key) -> Response:
        """The text of tokens."""
        return _json(await asyncio.to_thread(tokens.detokenize, context, body))


def _add_models(api: FastAPI, context: Context) -> None:
    def model() -> Model:
        return Model(
            id=context.model_name,
            created=context.created,
            owned_by="musespark",
            root=context.model_name,
            max_model_len=context.supervisor.max_model_len,
        )

    @api.get("/v1/models", response_model=ModelList, responses=_ERRORS)
    async def models(_key: _Key) -> Response:
        """What is served: one model."""
        return _json(ModelList(data=[model()]))

    # Names of models may hold slashes.
    @api.get("/v1/models/{name:path}", response_model=Model, responses=_ERRORS)
    async def one_model(name: str, _key: _Key) -> Response:
        """The model of this name."""
        context.check_model(name)
        return _json(model())


def _add_operation(api: FastAPI, context: Context) -> None:
    supervisor = context.supervisor

    def health(is_well: bool) -> Response:
        body = Health(status=supervisor.state).to_json()
        return Response(body, 200 if is_well else 503, media_type="application/json")

    @api.get("/health", response_model=Health, responses={503: {"model": Health}})
    @api.get("/health/ready", response_model=Health, responses={503: {"model": Health}})
    async def ready() -> Response:
        """Whether requests are taken now."""
        return health(supervisor.is_ready)

    @api.get("/health/live", response_model=Health, responses={503: {"model": Health}})
    async def live() -> Response:
        """Whether this process is worth keeping."""
        return health(not supervisor.is_hopeless)

    @api.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics(_key: _Key) -> Response:
        """For Prometheus."""
        return Response(context.metrics.render(), media_type=CONTENT_TYPE)
