"""An engine in other processes, called as if it were here."""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from musespark.checkpoint.load import Progress
from musespark.config.parallel import Parallelism
from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.checks import check_request
from musespark.engine.client import EngineInfo, EngineOutput, EngineRequest, EngineStats
from musespark.engine.engine import NewToken
from musespark.engine.messages import (
    Abort,
    Accepted,
    Failed,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    Stopped,
    Submit,
    error_of,
)
from musespark.engine.request import FinishReason
from musespark.errors import EngineDeadError, MuseSparkError
from musespark.executor.group import Launcher, RankGroup


@dataclass(slots=True)
class RemoteGrammar:
    """What an output must look like, to be compiled where the engine is."""

    wanted: StructuredOutput
    is_accepted: bool = False
    """Whether a request with it has been accepted, so that further ones will be."""


class RemoteEngine:
    """The calls of an `Engine`, on ranks in other processes."""

    def __init__(
        self, launcher: Launcher, parallelism: Parallelism, *, progress: Progress | None = None
    ) -> None:
        """Start the ranks, and return when they serve.

        Raises:
            MuseSparkError: what a rank raised while it loaded.
        """
        self._arrived: SimpleQueue[FromEngine] = SimpleQueue()
        self._postponed: deque[FromEngine] = deque()
        self._open: dict[int, set[int]] = {}
        self._numbers = itertools.count()
        self._stats = EngineStats()
        self._death: MuseSparkError | None = None
        self._group = RankGroup(launcher, parallelism, self._arrived.put, on_loading=progress)
        message = self._receive()
        assert isinstance(message, Ready)
        self.info: EngineInfo = message.info

    @property
    def has_work(self) -> bool:
        """Whether any output has not ended."""
        return bool(self._open)

    def compile_grammar(self, wanted: StructuredOutput) -> RemoteGrammar:
        """A grammar for `add_request`, which tells whether it is valid."""
        return RemoteGrammar(wanted)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        grammar: RemoteGrammar | None = None,
    ) -> int:
        """As for `Engine`."""
        prompt = tuple(prompt_token_ids)
        check_request(prompt, params, self.info.vocab_size, self.info.max_model_len)
        number = next(self._numbers)
        wanted = None if grammar is None else grammar.wanted
        self._group.send(Submit(EngineRequest(str(number), prompt, params, wanted)))
        self._open[number] = set(range(params.n))
        if grammar is not None and not grammar.is_accepted:
            self._wait_for_acceptance(number)
            grammar.is_accepted = True
        return number

    def abort(
        self,
        request_id: int,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> list[int]:
        """As for `Engine`, whose counts call every reason an abort."""
        del reason
        running = self._open.get(request_id, set())
        ended = sorted(running if index is None else running & {index})
        for each in ended:
            self._end(request_id, each)
        if ended:
            self._group.send(Abort(str(request_id), index))
        return ended

    def step(self) -> list[NewToken]:
        """Wait for tokens.

        Raises:
            EngineDeadError: a rank has died; says which and how.
        """
        while self._open:
            message = self._postponed.popleft() if self._postponed else self._receive()
            if isinstance(message, Outputs):
                self._stats = message.stats
                if tokens := self._take(message.outputs):
                    return tokens
            elif isinstance(message, Refused):
                raise error_of(message)
        return []

    def stats(self) -> EngineStats:
        """The newest that is known."""
        return self._stats

    def close(self) -> None:
        """End the ranks, and return when they have."""
        self._death = self._death or EngineDeadError("The engine was shut down.")
        self._group.end()

    def _receive(self) -> FromEngine:
        if self._death is not None:
            raise self._death
        message = self._arrived.get()
        if isinstance(message, Failed | Stopped):
            stopped = EngineDeadError("The engine was shut down.")
            self._death = error_of(message) if isinstance(message, Failed) else stopped
            self._group.kill()
            raise self._death
        return message

    def _wait_for_acceptance(self, number: int) -> None:
        while not isinstance(message := self._receive(), Accepted | Refused) or (
            message.request_id != str(number)
        ):
            self._postponed.append(message)
        if isinstance(message, Refused):
            del self._open[number]
            raise error_of(message)

    def _take(self, outputs: Sequence[EngineOutput]) -> list[NewToken]:
        tokens: list[NewToken] = []
        for output in outputs:
            number = int(output.request_id)
            if output.index not in self._open.get(number, ()):
                continue  # aborted here, and not yet there
            tokens += _new_tokens(number, output)
            if output.finish_reason is not None:
                self._end(number, output.index)
        return tokens

    def _end(self, request_id: int, index: int) -> None:
        running = self._open[request_id]
        running.discard(index)
        if not running:
            del self._open[request_id]


def _new_tokens(number: int, output: EngineOutput) -> list[NewToken]:
    last = len(output.token_ids) - 1
    return [
        NewToken(
            number,
            token_id,
            None if output.logprobs is None else output.logprobs[place],
            output.finish_reason if place == last else None,
            output.index,
            output.num_cached_tokens,
            output.prompt_logprobs if place == 0 else None,
        )
        for place, token_id in enumerate(output.token_ids)
    ]
