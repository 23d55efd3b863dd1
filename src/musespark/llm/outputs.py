"""What a caller gets back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from musespark.engine.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Timings:
    """Where one request's time went, in seconds."""

    time_to_first_token: float | None
    """From the call to the first token; None if none was produced."""
    total: float
    """From the call to the last token."""
    decode_tokens_per_second: float | None
    """Rate after the first token; None for fewer than two tokens."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The output of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    """Everything sampled, the end token included."""
    text: str | None
    """The output without special tokens and stop texts; None for a model without a tokenizer."""
    finish_reason: str
    """stop (end token or stop text), length, or abort."""
    logprobs: list[TokenLogprobs] | None
    """One entry per token, where asked for."""
    timings: Timings

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `logprobs` only where asked for."""
        fields = dataclasses.asdict(self)
        if self.logprobs is None:
            del fields["logprobs"]
        return fields


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one step added to the output of one prompt."""

    index: int
    """Which of the prompts."""
    token_ids: list[int]
    text: str
    """New text that can no longer turn out to begin a stop text; "" without a tokenizer."""
    finish_reason: str | None
    """None while the output goes on."""
