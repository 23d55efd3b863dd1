"""The stream of one request's deltas, filled by the client and read by the caller."""

import asyncio
from collections.abc import Callable

from musespark.engine.client import EngineOutput, EngineRequest
from musespark.errors import MuseSparkError


class DeltaStream:
    """The deltas of one request; those not fetched yet are joined, output by output."""

    def __init__(
        self,
        number: str,
        request: EngineRequest,
        accepted: asyncio.Future[None],
        leave: Callable[["DeltaStream"], None],
    ) -> None:
        self.number, self.name, self.accepted = number, request.request_id, accepted
        self._leave = leave
        self._unfinished = set(range(request.params.n))
        self._pending: dict[int, list[EngineOutput]] = {}
        self._changed = asyncio.Event()
        self._error: MuseSparkError | None = None
        self._is_closed = False

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have told their end."""
        return not self._unfinished

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def push(self, output: EngineOutput) -> None:
        self._pending.setdefault(output.index, []).append(output)
        if output.finish_reason is not None:
            self._unfinished.discard(output.index)
        self._changed.set()

    def fail(self, error: MuseSparkError) -> None:
        """End the stream, after what is pending, with an error."""
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._changed.set()

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._pending:
            if self._is_closed or self.is_finished:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return _joined(self._pending.pop(next(iter(self._pending))), self.name)

    async def aclose(self) -> None:
        self._is_closed = True
        self._pending.clear()
        self._changed.set()
        self._leave(self)


def _joined(outputs: list[EngineOutput], name: str) -> EngineOutput:
    """Consecutive deltas of one output as one, under the caller's name of the request."""
    first = outputs[0]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return EngineOutput(
        request_id=name,
        index=first.index,
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(logprobs) if logprobs else first.logprobs,
        finish_reason=outputs[-1].finish_reason,
        # An abort does not tell.
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        prompt_logprobs=first.prompt_logprobs,
    )
