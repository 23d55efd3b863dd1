"""A server on 127.0.0.1, in a thread of its own, with an engine that is a script."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
from tests.server.fake_engine import FakeEngine, Script

from musespark.chat.format import ChatFormat
from musespark.checkpoint.source import resolve_checkpoint
from musespark.config.sampling_defaults import SamplingDefaults
from musespark.config.server import ServerConfig
from musespark.engine.client import EngineRequest
from musespark.server.app import build_app
from musespark.server.context import Context
from musespark.server.run import DrainingServer, listen, serve, url_of
from musespark.server.supervisor import Supervisor

MODEL = "spark-mini"
# Machines that run tests may be slow; only what hangs should fail.
PATIENCE = 60.0


@cache
def chat_format() -> ChatFormat:
    return ChatFormat.from_folder(resolve_checkpoint(MODEL))


def wire(text: str) -> list[int]:
    """The tokens of what a model writes after `<|start|>assistant`."""
    return chat_format().tokenizer.encode_prompt(text, add_special_tokens=False)


def says(text: str) -> Script:
    """A script that writes `text`, whatever it is asked."""
    tokens = wire(text)
    return lambda _request, _index: tokens


def answer(text: str, reasoning: str = "hmm") -> str:
    """A turn on the wire."""
    return (
        f" to=self<|message|>{reasoning}<|eom|><|start|>assistant to=user<|message|>{text}<|eot|>"
    )


def call(name: str, **values: str) -> str:
    """A message that calls a tool, without its end."""
    parameters = "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items()
    )
    return (
        f' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n'
        f"{parameters}</atem:invoke>\n</atem:function_calls>"
    )


class LiveServer:
    """A running server, seen from the test's thread."""

    def __init__(
        self,
        engines: Callable[[], FakeEngine],
        config: ServerConfig,
        api_keys: tuple[str, ...] = (),
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.engines: list[FakeEngine] = []
        self._make_engine, self._config, self._api_keys = engines, config, api_keys
        self._defaults = defaults
        self._listener = listen(config.host, 0)
        self.url = url_of(self._listener)
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self._server: DrainingServer | None = None
        self._is_told = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def _launch(self) -> FakeEngine:
        self.engines.append(self._make_engine())
        return self.engines[-1]

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:
            self.error = error

    async def _serve(self) -> None:
        supervisor = Supervisor(self._launch, restart=self._config.restart_engine)
        context = Context.build(self._config, MODEL, chat_format(), supervisor, self._defaults)
        app = build_app(context, self._api_keys)
        self._server = DrainingServer(app, self._config, supervisor)
        await serve(self._server, supervisor, listener=self._listener, on_ready=self.ready.set)

    def signal(self) -> None:
        """What SIGTERM does."""
        assert self._server is not None
        self._is_told = True
        self._server.handle_exit(15, None)

    def in_loop(self, work: Callable[[], Any]) -> None:
        """Run something in the server's thread."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(work)
        self._loop.call_soon_threadsafe(done.set)
        assert done.wait(PATIENCE)

    @property
    def is_idle(self) -> bool:
        """Whether it is as good as new."""
        return self.thread.is_alive() and self.engine.is_healthy and not self.engine.num_running

    def stop(self) -> None:
        if self.thread.is_alive() and not self._is_told:
            self.signal()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "the server did not end"


# Servers that nothing has happened to, kept for the next test that wants one like it.
_IDLE: dict[Any, list[LiveServer]] = {}


def stop_idle_servers() -> None:
    """To be called once, after the last test."""
    servers = list(itertools.chain.from_iterable(_IDLE.values()))
    _IDLE.clear()
    for server in servers:
        server.signal()
    for server in servers:
        server.stop()


@contextlib.contextmanager
def live(
    script: Script | str,
    *,
    api_keys: tuple[str, ...] = (),
    defaults: SamplingDefaults | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server with a past, and a client. `script` is what the model writes, or how to."""
    key = (api_keys, defaults, *sorted((engine or {}).items()), *sorted(settings.items()))
    speak = says(script) if isinstance(script, str) else script
    kept = _IDLE.setdefault(key, [])
    if kept:
        server = kept.pop()
        server.engine.reset(speak)
    else:
        server = _start(speak, api_keys, defaults, engine or {}, settings)
        assert server.ready.wait(PATIENCE), server.error
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield server, client
    except BaseException:
        server.stop()
        raise
    if eventually(lambda: server.is_idle, 2):
        kept.append(server)
    else:
        server.stop()


@contextlib.contextmanager
def fresh(
    script: Script | str,
    *,
    wait: bool = True,
    make_engine: Callable[[], FakeEngine] | None = None,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server of one's own, for tests that end it, kill its engine, or read its counters."""
    speak = says(script) if isinstance(script, str) else script
    server = _start(speak, (), None, engine or {}, settings, make_engine)
    try:
        if wait:
            assert server.ready.wait(PATIENCE), server.error
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield server, client
    finally:
        server.stop()


def _start(
    speak: Script,
    api_keys: tuple[str, ...],
    defaults: SamplingDefaults | None,
    engine: dict[str, Any],
    settings: dict[str, Any],
    make_engine: Callable[[], FakeEngine] | None = None,
) -> LiveServer:
    config = ServerConfig(**{"shutdown_seconds": 0.0, **settings})
    make = make_engine or (lambda: FakeEngine(speak, **engine))
    return LiveServer(make, config, api_keys, defaults)


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.01)
    return holds()


def last_request(server: LiveServer) -> EngineRequest:
    return server.engine.requests[-1]
