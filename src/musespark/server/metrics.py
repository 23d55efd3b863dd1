"""What Prometheus reads at /metrics.

The engine counts for itself; its newest snapshot is read at every scrape. What only the server can
see, such as how long a client waited, is measured here. Nothing is global: each server has its own
registry.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from musespark.engine.client import (
    EngineClient,
    EngineOutput,
    EngineState,
    EngineStats,
    SpeculationStats,
)

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_TOKENS = tuple(4**power for power in range(10))

_Table = Mapping[str, tuple[str, Callable[[EngineStats], float]]]

_GAUGES: _Table = {
    "requests_running": ("Outputs in the batch.", lambda s: s.num_running),
    "requests_waiting": ("Requests in the engine's queue.", lambda s: s.num_waiting),
    "kv_cache_usage_ratio": ("Share of the KV cache in use.", lambda s: s.kv_cache_usage),
    "kv_blocks_full_used": ("Blocks of the full layers in use.", lambda s: s.num_full_blocks_used),
    "kv_blocks_sliding_used": (
        "Blocks of the sliding layers in use.",
        lambda s: s.num_sliding_blocks_used,
    ),
}
_COUNTERS: _Table = {
    "prompt_tokens": ("Prompt tokens of all requests.", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens generated.", lambda s: s.generation_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up.", lambda s: s.prefix_cache_queries),
    "prefix_cache_hits": ("Prompt tokens found in the cache.", lambda s: s.prefix_cache_hits),
    "preemptions": ("Requests put back to the queue for memory.", lambda s: s.preemptions),
    "engine_steps": ("Steps of the engine.", lambda s: s.steps),
    "engine_step_seconds": ("Time spent in steps.", lambda s: s.step_seconds),
    "engine_schedule_seconds": (
        "Of it, time not spent in the model.",
        lambda s: s.schedule_seconds,
    ),
}


class _EngineCollector(Collector):
    """The engine's own numbers, fetched when somebody asks."""

    def __init__(self, engine: Callable[[], EngineClient | None]) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        engine = self._engine()
        state = EngineState.STARTING if engine is None else engine.state
        stats = EngineStats() if engine is None else engine.stats()
        ready = state is EngineState.READY
        yield GaugeMetricFamily("musespark_engine_ready", "1 while requests are taken.", ready)
        ranks = engine.info.memory_bytes if engine is not None and ready else ()
        memory = GaugeMetricFamily(
            "musespark_rank_memory_bytes",
            "What each process of the model held once it was loaded.",
            labels=["rank"],
        )
        for rank, num_bytes in enumerate(ranks):
            memory.add_metric([str(rank)], num_bytes)
        yield memory
        yield GaugeMetricFamily(
            "musespark_ranks", "Processes that share the model; 0 while it loads.", len(ranks)
        )
        for name, (text, read) in _GAUGES.items():
            yield GaugeMetricFamily(f"musespark_{name}", text, read(stats))
        for name, (text, read) in _COUNTERS.items():
            yield CounterMetricFamily(f"musespark_{name}", text, read(stats))
        finished = CounterMetricFamily(
            "musespark_outputs_finished", "Outputs that have ended.", labels=["reason"]
        )
        # Every reason is there from the beginning: a rate needs a value to start from.
        for reason, count in {"stop": 0, "length": 0, "abort": 0, **stats.finished}.items():
            finished.add_metric([str(reason)], count)
        yield finished
        load = CounterMetricFamily(
            "musespark_expert_routes",
            "Times an expert was chosen, with --expert-load-metrics; a few seconds old.",
            labels=["layer", "expert"],
        )
        for layer, counts in stats.expert_load.items():
            for expert, count in enumerate(counts):
                load.add_metric([str(layer), str(expert)], count)
        yield load
        if stats.speculation is not None:
            yield from _speculation(stats.speculation)


def _speculation(stats: SpeculationStats) -> Iterable[Metric]:
    """What a draft brings. Tokens per cycle: cycle_tokens over cycles; acceptance at a position:
    accepted over verified there."""
    name = "musespark_speculation"
    yield CounterMetricFamily(f"{name}_cycles", "Guesses verified.", stats.cycles)
    yield CounterMetricFamily(
        f"{name}_cycle_tokens", "Tokens that they have added to outputs.", stats.cycle_tokens
    )
    for kind, counts in (("verified", stats.verified), ("accepted", stats.accepted)):
        family = CounterMetricFamily(
            f"{name}_{kind}_tokens", f"Guessed tokens {kind}, by position.", labels=["position"]
        )
        for position, count in enumerate(counts, start=1):
            family.add_metric([str(position)], count)
        yield family
    yield CounterMetricFamily(
        f"{name}_draft_seconds", "Time spent on guessing.", stats.draft_seconds
    )
    # A gauge: a draft that knows nothing costs time.
    yield GaugeMetricFamily(
        f"{name}_saved_seconds", "Time saved, by estimate.", stats.saved_seconds
    )


class Metrics:
    """All metrics of one server."""

    def __init__(self, engine: Callable[[], EngineClient | None]) -> None:
        """`engine` gives the engine of the moment, or None before the first one."""
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self.responses = Counter(
            "musespark_http_responses",
            "Responses by path and status.",
            ["path", "status"],
            registry=registry,
        )
        self.engine_restarts = Counter(
            "musespark_engine_restarts", "Times the engine was started again.", registry=registry
        )
        self.clients_gone = Counter(
            "musespark_clients_gone",
            "Requests whose client left or stalled before the end.",
            registry=registry,
        )
        self._first_token = _histogram(
            registry, "time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN
        )
        self._per_token = _histogram(
            registry, "time_per_output_token_seconds", "Between two tokens.", _PER_TOKEN
        )
        self._whole = _histogram(registry, "request_seconds", "From request to last token.", _WHOLE)
        self._prompt = _histogram(
            registry, "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._output = _histogram(
            registry, "request_output_tokens", "Tokens generated for an output.", _TOKENS
        )

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def stopwatch(self, num_prompt_tokens: int) -> "Stopwatch":
        """Starts timing one request."""
        self._prompt.observe(num_prompt_tokens)
        return Stopwatch(self._first_token, self._per_token, self._whole, self._output)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]
) -> Histogram:
    return Histogram(f"musespark_{name}", text, buckets=buckets, registry=registry)


class Stopwatch:
    """Times one request; each of its outputs on its own."""

    def __init__(
        self, first_token: Histogram, per_token: Histogram, whole: Histogram, output: Histogram
    ) -> None:
        self._first_token, self._per_token = first_token, per_token
        self._whole, self._output = whole, output
        self._started = time.perf_counter()
        self._last: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def observe(self, delta: EngineOutput) -> None:
        """Take the time of a delta that has just come."""
        count, index = len(delta.token_ids), delta.index
        now = time.perf_counter()
        if count:
            if index in self._last:
                # Tokens that came together waited for each other, or for their reader.
                self._per_token.observe((now - self._last[index]) / count)
            else:
                self._first_token.observe(now - self._started)
            self._last[index] = now
            self._counts[index] = self._counts.get(index, 0) + count
        if delta.finish_reason is not None:
            self._whole.observe(now - self._started)
            self._output.observe(self._counts.get(index, 0))


class ResponseCounter:
    """Counts the responses of an application. Paths that it does not have count as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)
