"""A running call: tokens of some requests become text, in order, until all have ended."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from musespark.chat.tokenizer import Tokenizer
from musespark.config.sampling import SamplingParams
from musespark.engine.engine import Engine, NewToken
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.llm.outputs import Completion, CompletionDelta, Timings
from musespark.llm.stop_text import StopTextFinder


class Output:
    """The output of one request as it grows."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self._prompt = list(prompt_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._text: list[str] = []
        self._decoder = None if tokenizer is None else tokenizer.stream()
        self._stops = StopTextFinder(params.stop)
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = self._started

    def push(self, token: NewToken) -> CompletionDelta:
        """Take one token; `finish_reason` of the result is "stop" if it completed a stop text."""
        self._last_token = time.perf_counter()
        if self._first_token is None:
            self._first_token = self._last_token
        self._token_ids.append(token.token_id)
        if self._logprobs is not None and token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        self.finish_reason = token.finish_reason
        text = self._decode(token.token_id, last=token.finish_reason is not None)
        if self._stops.found:
            self.finish_reason = FinishReason.STOP
        return CompletionDelta(self.index, [token.token_id], text, self.finish_reason)

    def completion(self) -> Completion:
        """The output so far; one that has not ended counts as aborted."""
        count = len(self._token_ids)
        decoding = self._last_token - (self._first_token or self._last_token)
        return Completion(
            prompt_token_ids=self._prompt,
            token_ids=list(self._token_ids),
            text=None if self._decoder is None else "".join(self._text),
            finish_reason=str(self.finish_reason or FinishReason.ABORT),
            logprobs=self._logprobs,
            timings=Timings(
                time_to_first_token=self._first_token and self._first_token - self._started,
                total=self._last_token - self._started,
                decode_tokens_per_second=(count - 1) / decoding if decoding > 0 else None,
            ),
        )

    def _decode(self, token_id: int, *, last: bool) -> str:
        if self._decoder is None:
            return ""
        pieces = self._decoder.push(token_id)
        if last:
            pieces += self._decoder.flush()
        text = self._stops.push("".join(piece.text for piece in pieces if not piece.is_special))
        if last:
            text += self._stops.flush()
        self._text.append(text)
        return text


class Generation(Iterator[CompletionDelta]):
    """Iterates over the deltas of one call's prompts; closing it ends those still running."""

    def __init__(
        self, engine: Engine, outputs: dict[int, Output], step: Callable[[], None]
    ) -> None:
        """`outputs` by request id; `step` runs the engine once for all callers."""
        self._engine, self._step = engine, step
        self._outputs = outputs
        self._running = set(outputs)
        self._deltas: deque[CompletionDelta] = deque()

    def take(self, token: NewToken) -> None:
        """Take one of this call's tokens from a step of the engine."""
        output = self._outputs[token.request_id]
        self._deltas.append(output.push(token))
        if output.finish_reason is not None:
            # A stop text is known here only; the engine sees no text.
            self._engine.abort(token.request_id, output.finish_reason)
            self._running.discard(token.request_id)

    def __next__(self) -> CompletionDelta:
        while not self._deltas:
            if not self._running:
                raise StopIteration
            self._step()
        return self._deltas.popleft()

    def results(self) -> list[Completion]:
        """What every prompt has produced so far, in the order of the prompts."""
        return [output.completion() for output in self._outputs.values()]

    def close(self) -> None:
        """End whatever still runs, and free what it holds."""
        for request_id in self._running:
            self._engine.abort(request_id)
        self._running.clear()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
