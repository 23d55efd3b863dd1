"""What `LLM` asks of an engine, wherever it runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from musespark.config.sampling import SamplingParams
from musespark.config.structured_output import StructuredOutput
from musespark.engine.client import EngineStats
from musespark.engine.engine import NewToken
from musespark.engine.request import FinishReason


class OpenEngine(Protocol):
    """An `Engine`, or a `RemoteEngine`."""

    @property
    def has_work(self) -> bool:
        """Whether any output has not ended."""
        ...

    def compile_grammar(self, wanted: StructuredOutput) -> Any:
        """A grammar for `add_request`."""
        ...

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, grammar: Any = None
    ) -> int:
        """Queue a prompt; returns the request's id."""
        ...

    def abort(
        self,
        request_id: int,
        reason: FinishReason = FinishReason.ABORT,
        index: int | None = None,
    ) -> list[int]:
        """End a request, or one output of it; returns the outputs that this has ended."""
        ...

    def stats(self) -> EngineStats:
        """What has happened so far."""
        ...

    def step(self) -> list[NewToken]:
        """The next tokens."""
        ...
