"""`musespark serve`: OpenAI's API and a chat page over HTTP."""

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from musespark.cli.arguments import Device, Dtype, Model, Revision
from musespark.cli.options import finish, pick, with_fields
from musespark.config.engine import EngineConfig
from musespark.config.server import ServerConfig
from musespark.errors import ConfigError

if TYPE_CHECKING:
    from musespark.engine.client import EngineClient, EngineInfo

_EXAMPLE = '{"messages": [{"role": "user", "content": "What is 12 + 30?"}]}'
_SECONDS_BETWEEN_LINES = 10.0


@finish
@with_fields(EngineConfig)
@with_fields(ServerConfig)
def serve(
    model: Model = "spark-mini",
    *,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="MUSESPARK_API_KEY",
            help="Key that clients must send; may be given several times. Other users of this "
            "machine can see it here, but not in the environment variable.",
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    revision: Revision = None,
    **settings: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's API, metrics, and a chat page. Ctrl-C ends it."""
    config = ServerConfig(**pick(ServerConfig, settings))
    engine_config = EngineConfig(**pick(EngineConfig, settings))
    keys = _checked_keys(api_key or [])
    try:
        from musespark.server.launch import run_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Serving needs the package {error.name!r}: pip install 'musespark[server]'."
        ) from None
    from musespark.llm.serving import launch_engine

    def launch() -> "EngineClient":
        return launch_engine(
            model,
            engine_config,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=LoadingLines(),
        )

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    if not (config.is_local or keys):
        print("Anyone who can reach this machine can use the server: --api-key limits that.")
    print(f"Loading {model} ...", flush=True)
    run_server(model, config, launch, api_keys=keys, revision=revision, on_ready=_announce)


class LoadingLines:
    """A `Progress` in lines, which stay readable in a log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._told_at, self._is_loaded = clock, clock(), False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Every ten seconds, and once at the end, after which kernels and graphs are made."""
        now = self._clock()
        if self._is_loaded:
            return
        if done_bytes == total_bytes:
            self._is_loaded = True
            print("The weights are loaded. Getting ready for requests ...", flush=True)
        elif now - self._told_at >= _SECONDS_BETWEEN_LINES:
            self._told_at = now
            done, total = done_bytes / 2**30, total_bytes / 2**30
            print(f"Loaded {done:.1f} of {total:.1f} GiB ({done / total:.0%}) ...", flush=True)


def _checked_keys(keys: list[str]) -> tuple[str, ...]:
    if any(not key or key != key.strip() for key in keys):
        raise ConfigError("api_key: must not be empty, nor begin or end with a space.")
    return tuple(keys)


def _announce(name: str, url: str, info: "EngineInfo", *, needs_key: bool) -> None:
    if info.memory_bytes:
        each = " ".join(f"{num_bytes / 2**30:.2f}" for num_bytes in info.memory_bytes)
        device = info.device.partition(":")[0]
        print(f"Loaded as {info.layout} on {device}; memory by rank: {each} GiB")
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    kind = "-H 'Content-Type: application/json'"
    print(f"Serving {name} at {url} - open it in a browser, or:")
    print(f"  curl {url}/v1/chat/completions {key}{kind} -d '{_EXAMPLE}'", flush=True)
