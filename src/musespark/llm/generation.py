"""A running call: tokens of some requests become text, in order, until all have ended."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from musespark.chat.pieces import join_text
from musespark.chat.tokenizer import Tokenizer
from musespark.config.sampling import SamplingParams
from musespark.engine.engine import NewToken
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.llm.open_engine import OpenEngine
from musespark.llm.output_decoder import OutputDecoder
from musespark.llm.outputs import Completion, CompletionDelta, Timings


class Output:
    """One output of one request as it grows."""

    def __init__(
        self,
        index: int,
        choice: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index, self.choice = index, choice
        self.finish_reason: FinishReason | None = None
        self._prompt = list(prompt_token_ids)
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._text: list[str] = []
        self._decoder: OutputDecoder | None = None
        if tokenizer is not None:
            self._decoder = OutputDecoder(tokenizer, params.stop, params.min_tokens)
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = self._started

    def push(self, token: NewToken) -> CompletionDelta:
        """Take one token; `finish_reason` of the result is "stop" if it completed a stop text."""
        self._last_token = time.perf_counter()
        if self._first_token is None:
            self._first_token = self._last_token
            self._num_cached_tokens = token.num_cached_tokens
        if token.prompt_logprobs is not None:
            self._prompt_logprobs = list(token.prompt_logprobs)
        self._token_ids.append(token.token_id)
        if self._logprobs is not None and token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        self.finish_reason = token.finish_reason
        text = self._decode(token.token_id, last=token.finish_reason is not None)
        return CompletionDelta(self.index, [token.token_id], text, self.finish_reason, self.choice)

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
            choice=self.choice,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _decode(self, token_id: int, *, last: bool) -> str:
        if self._decoder is None:
            return ""
        pieces = self._decoder.push([token_id], last=last)
        if self._decoder.found_stop:
            self.finish_reason = FinishReason.STOP
        self._text.append(join_text(pieces, keep_special=False))
        return self._text[-1]


class Generation(Iterator[CompletionDelta]):
    """Iterates over the deltas of one call's prompts; closing it ends those still running."""

    def __init__(
        self,
        engine: OpenEngine,
        outputs: dict[tuple[int, int], Output],
        step: Callable[[], None],
    ) -> None:
        """`outputs` by request id and choice; `step` runs the engine once for all callers."""
        self._engine, self._step = engine, step
        self._outputs = outputs
        self._running = set(outputs)
        self._deltas: deque[CompletionDelta] = deque()

    def take(self, token: NewToken) -> None:
        """Take one of this call's tokens from a step of the engine."""
        key = token.request_id, token.output_index
        if key not in self._running:
            return  # the same step's token before completed a stop text
        output = self._outputs[key]
        self._deltas.append(output.push(token))
        if output.finish_reason is not None:
            # A stop text is known here only; the engine sees no text.
            self._engine.abort(token.request_id, output.finish_reason, output.choice)
            self._running.discard(key)

    def __next__(self) -> CompletionDelta:
        while not self._deltas:
            if not self._running:
                raise StopIteration
            self._step()
        return self._deltas.popleft()

    def results(self) -> list[Completion]:
        """What every output holds so far: all of the first prompt, of the second, and so on."""
        return [output.completion() for output in self._outputs.values()]

    def close(self) -> None:
        """End whatever still runs, and free what it holds."""
        for request_id, choice in self._running:
            self._engine.abort(request_id, index=choice)
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
