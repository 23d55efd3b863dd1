"""From a model's name to a running server."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from uvicorn.loops.auto import auto_loop_factory

from musespark.chat.format import ChatFormat
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.sampling_defaults import SamplingDefaults
from musespark.config.server import ServerConfig
from musespark.engine.client import EngineClient, EngineInfo
from musespark.server.app import build_app
from musespark.server.context import Context
from musespark.server.run import DrainingServer, listen, serve, url_of
from musespark.server.supervisor import Supervisor


class Announce(Protocol):
    """Tells people where the model is served, and how it is spread."""

    def __call__(self, name: str, url: str, info: EngineInfo, *, needs_key: bool) -> None: ...


def run_server(
    model: str,
    config: ServerConfig,
    launch: Callable[[], EngineClient],
    *,
    api_keys: tuple[str, ...] = (),
    revision: str | None = None,
    on_ready: Announce,
) -> None:
    """Serve until a signal says to stop.

    Args:
        model: a packaged model's name, a folder, or a Hugging Face repository id.
        config: where to listen, and the limits.
        launch: starts the engine; called in the running loop, and again if it dies and
            `config.restart_engine` says so.
        api_keys: what clients must send; none: everyone may.
        revision: branch, tag or commit of a Hugging Face repository.
        on_ready: called once requests are taken.

    Raises:
        MuseSparkError: the address is taken, the checkpoint damaged, the model too large.
    """
    listener = listen(config.host, config.port)
    try:
        folder = resolve_checkpoint(model, revision)
        supervisor = Supervisor(launch, restart=config.restart_engine)
        context = Context.build(
            config,
            _public_name(model),
            ChatFormat.from_folder(folder),
            supervisor,
            SamplingDefaults.from_folder(folder),
        )
        server = DrainingServer(build_app(context, api_keys), config, supervisor)

        def announce() -> None:
            info, needs_key = context.engine.info, bool(api_keys)
            on_ready(context.model_name, url_of(listener), info, needs_key=needs_key)

        with asyncio.Runner(loop_factory=auto_loop_factory(use_subprocess=False)) as runner:
            runner.run(serve(server, supervisor, listener=listener, on_ready=announce))
    finally:
        listener.close()


def _public_name(model: str) -> str:
    """What clients call a model that was given as a path: its folder's name."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model
