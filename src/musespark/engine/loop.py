"""The loop an engine runs in: take messages, step, tell what came out.

It waits for messages only while it has nothing to do, and never for whoever reads its output.
Engines that share experts step together: before each step they agree whether any of them has work.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest
from musespark.engine.engine import Engine, NewToken
from musespark.engine.grammar import Grammar
from musespark.engine.messages import (
    Abort,
    Accepted,
    ForgetPrefixes,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Submit,
    ToEngine,
)
from musespark.engine.request import FinishReason
from musespark.errors import MuseSparkError, QueueFullError, RequestError

# Between two readings of the experts' load, which wait for the device and are long to send.
_EXPERT_LOAD_SECONDS = 5.0
# How long an engine that steps together with others waits for messages while none has work.
_IDLE_SECONDS = 0.005


class Agree(Protocol):
    """Whether any of the engines that step together says so, flag by flag."""

    def __call__(self, *flags: bool) -> tuple[bool, ...]:
        """Called by all of them before each step."""
        ...


def _alone(*flags: bool) -> tuple[bool, ...]:
    return flags


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A request whose grammar is there, or has turned out to be none."""

    request: EngineRequest
    grammar: "Future[Grammar]"


class EngineLoop:
    """Serves one engine to one client."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        send: Callable[[FromEngine], None],
        max_queue_len: int,
        *,
        agree: Agree = _alone,
    ) -> None:
        """`send` must return at once; `agree` matters to engines whose steps are in lockstep."""
        self.inbox: SimpleQueue[ToEngine | _Compiled] = SimpleQueue()
        self._engine, self._info, self._send = engine, info, send
        self._max_queue_len = max_queue_len
        self._number_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._num_open: dict[int, int] = {}
        self._compilers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._compiling: dict[str, Future[Grammar]] = {}
        self._is_stopping = False
        self._load_told = -_EXPERT_LOAD_SECONDS
        self._agree = agree if engine.in_lockstep else _alone
        self._is_idle = True

    def run(self) -> None:
        """Serve until told to shut down, or until another engine of the lockstep is."""
        self._send(Ready(self._info))
        while True:
            for message in self._receive():
                self._handle(message)
            any_work, any_end = self._agree(self._engine.has_work, self._is_stopping)
            if any_end:
                break
            self._is_idle = not any_work
            if any_work:
                had_work = self._engine.has_work
                outputs = [self._output(token) for token in self._engine.step()]
                if had_work:
                    self._report(outputs)
        for name in list(self._number_of):
            self._abort(name, None)
        self._engine.drain()
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _receive(self) -> "Iterable[ToEngine | _Compiled]":
        """All messages that are there; with nothing to do, waits for one."""
        messages: list[ToEngine | _Compiled] = []
        try:
            if self._is_idle and not self._engine.has_work:
                timeout = _IDLE_SECONDS if self._engine.in_lockstep else None
                messages.append(self.inbox.get(timeout=timeout))
            while True:
                messages.append(self.inbox.get_nowait())
        except Empty:
            return messages

    def _handle(self, message: "ToEngine | _Compiled") -> None:
        if isinstance(message, Submit):
            constrained = message.request.structured_output is not None
            (self._compile if constrained else self._submit)(message.request)
        elif isinstance(message, _Compiled):
            self._take_compiled(message.request, message.grammar)
        elif isinstance(message, Abort):
            self._abort(message.request_id, message.index)
        elif isinstance(message, ForgetPrefixes):
            self._engine.scheduler.blocks.forget_prefixes()
        elif isinstance(message, Shutdown):
            self._is_stopping = True

    def _submit(self, request: EngineRequest, grammar: Grammar | None = None) -> None:
        try:
            self._check_queue(request)
            number = self._engine.add_request(request.prompt_token_ids, request.params, grammar)
        except MuseSparkError as error:
            self._send(Refused(request.request_id, type(error).__name__, str(error)))
            return
        self._number_of[request.request_id] = number
        self._name_of[number] = request.request_id
        self._num_open[number] = request.params.n
        self._send(Accepted(request.request_id))

    def _compile(self, request: EngineRequest) -> None:
        """Make a request's grammar beside the steps, and submit the request once it is there."""
        assert request.structured_output is not None
        compiling = self._compilers.submit(self._engine.compile_grammar, request.structured_output)
        self._compiling[request.request_id] = compiling
        compiling.add_done_callback(lambda done: self.inbox.put(_Compiled(request, done)))

    def _take_compiled(self, request: EngineRequest, compiled: "Future[Grammar]") -> None:
        if self._compiling.get(request.request_id) is not compiled:
            return  # aborted meanwhile
        del self._compiling[request.request_id]
        if (error := compiled.exception()) is None:
            self._submit(request, compiled.result())
        elif isinstance(error, MuseSparkError):
            self._send(Refused(request.request_id, type(error).__name__, str(error)))
        else:
            raise error

    def _check_queue(self, request: EngineRequest) -> None:
        if request.request_id in self._number_of:
            raise RequestError(
                f"A request named {request.request_id!r} runs already: names must differ."
            )
        # Those that the next step can start do not wait.
        scheduler = self._engine.scheduler
        num_waiting = len(scheduler.waiting) + len(scheduler.running) - scheduler.max_num_seqs
        if num_waiting >= self._max_queue_len:
            raise QueueFullError(
                f"{num_waiting} requests wait already (max_queue_len {self._max_queue_len}). "
                "Try again later."
            )

    def _abort(self, name: str, index: int | None) -> None:
        self._compiling.pop(name, None)
        number = self._number_of.get(name)
        if number is None:
            return
        ended = self._engine.abort(number, index=index)
        outputs = [EngineOutput(name, i, (), finish_reason=FinishReason.ABORT) for i in ended]
        self._close(number, len(ended))
        self._report(outputs)

    def _output(self, token: NewToken) -> EngineOutput:
        name = self._name_of[token.request_id]
        if token.finish_reason is not None:
            self._close(token.request_id, 1)
        return EngineOutput(
            name,
            token.output_index,
            (token.token_id,),
            None if token.logprobs is None else (token.logprobs,),
            token.finish_reason,
            token.num_cached_tokens,
            token.prompt_logprobs,
        )

    def _close(self, number: int, count: int) -> None:
        self._num_open[number] -= count
        if self._num_open[number] == 0:
            del self._num_open[number], self._number_of[self._name_of.pop(number)]

    def _report(self, outputs: list[EngineOutput]) -> None:
        stats, load = self._engine.stats(), self._engine.expert_load
        now = time.monotonic()
        is_due = now - self._load_told > _EXPERT_LOAD_SECONDS or not self._engine.has_work
        if load is not None and is_due:
            self._load_told = now
            stats = dataclasses.replace(stats, expert_load=load.read())
        self._send(Outputs(outputs, stats))
