"""What a caller gets back."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from musespark.chat.events import Turn
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
    """One output of one prompt."""

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
    choice: int = 0
    """Which of the prompt's `n` outputs."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that came out of the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry per prompt token, None for the first; with choice 0 only, where asked for."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON; log-probabilities only where asked for."""
        fields = dataclasses.asdict(self)
        for name in ("logprobs", "prompt_logprobs"):
            if fields[name] is None:
                del fields[name]
        return fields


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one step added to one output."""

    index: int
    """Which of the prompts."""
    token_ids: list[int]
    text: str
    """New text that can no longer turn out to begin a stop text; "" without a tokenizer."""
    finish_reason: str | None
    """None while the output goes on."""
    choice: int = 0
    """Which of the prompt's `n` outputs."""


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One assistant turn."""

    turn: Turn
    """Reasoning, answer and tool calls apart."""
    completion: Completion
    """The tokens it was made of."""
