"""The loop an engine runs in: take messages, step, tell what came out.

It waits for messages only while it has nothing to do, and never for whoever reads its output.
"""

from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue

from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest
from musespark.engine.engine import Engine, NewToken
from musespark.engine.messages import (
    Abort,
    Accepted,
    ForgetPrefixes,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Shutdown,
    Stopped,
    Submit,
    ToEngine,
)
from musespark.engine.request import FinishReason
from musespark.errors import MuseSparkError, QueueFullError, RequestError


class EngineLoop:
    """Serves one engine to one client."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        send: Callable[[FromEngine], None],
        max_queue_len: int,
    ) -> None:
        """`send` must return at once."""
        self.inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self._engine, self._info, self._send = engine, info, send
        self._max_queue_len = max_queue_len
        self._number_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._num_open: dict[int, int] = {}
        self._is_stopping = False

    def run(self) -> None:
        """Serve until told to shut down."""
        self._send(Ready(self._info))
        while not self._is_stopping:
            for message in self._receive():
                self._handle(message)
            if self._engine.has_work and not self._is_stopping:
                self._report([self._output(token) for token in self._engine.step()])
        for name in list(self._number_of):
            self._abort(name, None)
        self._send(Stopped())

    def _receive(self) -> Iterable[ToEngine]:
        """All messages that are there; with nothing to do, waits for one."""
        messages = [] if self._engine.has_work else [self.inbox.get()]
        try:
            while True:
                messages.append(self.inbox.get_nowait())
        except Empty:
            return messages

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message.request)
        elif isinstance(message, Abort):
            self._abort(message.request_id, message.index)
        elif isinstance(message, ForgetPrefixes):
            self._engine.scheduler.blocks.forget_prefixes()
        elif isinstance(message, Shutdown):
            self._is_stopping = True

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._check_queue(request)
            number = self._engine.add_request(request.prompt_token_ids, request.params)
        except MuseSparkError as error:
            self._send(Refused(request.request_id, type(error).__name__, str(error)))
            return
        self._number_of[request.request_id] = number
        self._name_of[number] = request.request_id
        self._num_open[number] = request.params.n
        self._send(Accepted(request.request_id))

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
        self._send(Outputs(outputs, self._engine.stats()))
