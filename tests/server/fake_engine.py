"""An engine that is a script: it says what it is told to, as fast as it is told to."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from musespark.engine.client import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineState,
    EngineStats,
)
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.errors import EngineDeadError, EngineNotReadyError, MuseSparkError, QueueFullError

Script = Callable[[EngineRequest, int], Sequence[int]]


@dataclass
class _Running:
    request: EngineRequest
    pending: dict[int, EngineOutput] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    error: Exception | None = None


class FakeEngine:
    """Speaks the tokens that `script` gives for a request and one of its outputs."""

    def __init__(
        self,
        script: Script,
        *,
        delay: float = 0.0,
        max_model_len: int = 4096,
        max_queue_len: int = 1000,
        load_error: MuseSparkError | None = None,
        load_seconds: float = 0.0,
        structured_output: bool = True,
    ) -> None:
        self.script, self.delay = script, delay
        self.max_queue_len = max_queue_len
        self.load_error, self.load_seconds = load_error, load_seconds
        self.state = EngineState.STARTING
        self.requests: list[EngineRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.drain_seconds: float | None = None
        self.num_tokens = 0
        self._running: dict[str, _Running] = {}
        self._info = EngineInfo(
            vocab_size=384,
            max_model_len=max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            eos_token_ids=(257, 259),
            block_size=16,
            num_full_blocks=100,
            num_sliding_blocks=100,
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            structured_output=structured_output,
        )

    # --- EngineClient

    @property
    def is_healthy(self) -> bool:
        return self.state is EngineState.READY

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def wait_ready(self) -> None:
        await asyncio.sleep(self.load_seconds)
        if self.load_error is not None:
            self.state = EngineState.DEAD
            raise self.load_error
        if self.state is EngineState.DEAD:
            raise EngineDeadError("The engine has died.")
        self.state = EngineState.READY

    async def generate(self, request: EngineRequest) -> "_Stream":
        if self.state is EngineState.DEAD:
            raise EngineDeadError("The engine has died.")
        if self.state is not EngineState.READY:
            raise EngineNotReadyError("The engine takes no requests now.")
        if len(self._running) >= self.max_queue_len:
            raise QueueFullError("Too many requests wait already.")
        assert request.request_id not in self._running, "request ids must differ"
        self.requests.append(request)
        running = self._running[request.request_id] = _Running(request)
        running.tasks = [
            asyncio.create_task(self._speak(running, index)) for index in range(request.params.n)
        ]
        return _Stream(self, running)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        self.aborted.append((request_id, index))
        indices = range(running.request.params.n) if index is None else (index,)
        for one in indices:
            running.tasks[one].cancel()
            if one not in running.finished:
                self._add(running, EngineOutput(request_id, one, (), None, FinishReason.ABORT))

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._running), generation_tokens=self.num_tokens)

    async def reset_prefix_cache(self) -> None:
        raise NotImplementedError

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        if self.state is EngineState.DEAD:
            return
        self.drain_seconds = drain_seconds
        self.state = EngineState.DRAINING
        deadline = asyncio.get_running_loop().time() + drain_seconds
        while self._running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for request_id in list(self._running):
            await self.abort(request_id)
        self.state = EngineState.DEAD

    # --- for tests

    @property
    def num_running(self) -> int:
        return len(self._running)

    def reset(self, script: Script) -> None:
        """Forget the past, for the next test."""
        self.script = script
        self.requests, self.aborted, self.num_tokens = [], [], 0

    def die(self) -> None:
        """What a crash of the engine's process looks like from here."""
        self.state = EngineState.DEAD
        for running in self._running.values():
            for task in running.tasks:
                task.cancel()
            running.error = EngineDeadError("The engine has died.")
            running.news.set()

    async def _speak(self, running: _Running, index: int) -> None:
        request = running.request
        tokens = list(self.script(request, index))
        limit = request.params.max_tokens or self._info.max_model_len
        is_cut = len(tokens) > limit
        tokens = tokens[:limit]
        for place, token_id in enumerate(tokens):
            if self.delay or place % 64 == 0:
                await asyncio.sleep(self.delay)
            is_last = place == len(tokens) - 1
            reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
            self._add(
                running,
                EngineOutput(
                    request.request_id,
                    index,
                    (token_id,),
                    self._logprobs(request, token_id),
                    reason if is_last else None,
                    num_cached_tokens=1,
                    prompt_logprobs=self._prompt_logprobs(request) if place == 0 else None,
                ),
            )

    def _add(self, running: _Running, new: EngineOutput) -> None:
        """Join with what has not been fetched yet."""
        self.num_tokens += len(new.token_ids)
        old = running.pending.get(new.index)
        if old is not None:
            new = EngineOutput(
                new.request_id,
                new.index,
                old.token_ids + new.token_ids,
                (old.logprobs or ()) + (new.logprobs or ()) if new.logprobs else old.logprobs,
                new.finish_reason,
                new.num_cached_tokens,
                old.prompt_logprobs,
            )
        running.pending[new.index] = new
        if new.finish_reason is not None:
            running.finished.add(new.index)
            if len(running.finished) == running.request.params.n:
                self._running.pop(new.request_id, None)
        running.news.set()

    @staticmethod
    def _logprobs(request: EngineRequest, token_id: int) -> tuple[TokenLogprobs] | None:
        count = request.params.logprobs
        if count is None:
            return None
        top = tuple((token_id + i, -0.5 - i) for i in range(count))
        return (TokenLogprobs(-0.5, 1, top),)

    @staticmethod
    def _prompt_logprobs(request: EngineRequest) -> tuple[TokenLogprobs | None, ...] | None:
        count = request.params.prompt_logprobs
        if count is None:
            return None
        known = [
            TokenLogprobs(float("-inf"), 7, tuple((i, -1.0 - i) for i in range(count)))
            for _ in request.prompt_token_ids[1:]
        ]
        return (None, *known)


class _Stream:
    def __init__(self, engine: FakeEngine, running: _Running) -> None:
        self._engine, self._running = engine, running
        self._ended: set[int] = set()

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> EngineOutput:
        running = self._running
        if len(self._ended) == running.request.params.n:
            raise StopAsyncIteration
        while not running.pending:
            if running.error is not None:
                raise running.error
            running.news.clear()
            await running.news.wait()
        output = running.pending.pop(next(iter(running.pending)))
        if output.finish_reason is not None:
            self._ended.add(output.index)
        return output

    async def aclose(self) -> None:
        await self._engine.abort(self._running.request.request_id)
