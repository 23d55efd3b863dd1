"""One output of a plain completion, from tokens to text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from musespark.chat.pieces import join_text
from musespark.chat.tokenizer import Tokenizer
from musespark.engine.client import EngineOutput
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.llm.output_decoder import OutputDecoder

TextFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What the text holds, and what ends it beside the model."""

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    """The text of so many tokens is not searched for stop texts."""
    max_tokens: int | None = None
    """The engine makes one token at least; with 0 it does not count."""
    keep_special: bool = False
    """Special tokens stand in the text by name."""


@dataclass(slots=True)
class TextDelta:
    """What some tokens added to a text."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One for each token, where asked for; None for a token that nothing predicts."""
    finish_reason: TextFinish | None = None

    def add(self, later: "TextDelta") -> None:
        """Append what came later."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


class TextReader:
    """Reads one output while it is written."""

    def __init__(
        self, tokenizer: Tokenizer, rules: TextRules, echo: Sequence[int] | None = None
    ) -> None:
        """`echo` is the prompt, where the text is to begin with it."""
        self._tokenizer, self._rules, self._echo = tokenizer, rules, echo
        self._decoder = OutputDecoder(tokenizer, rules.stop, rules.min_tokens)
        self.finish_reason: TextFinish | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the output, the one that completed a stop text included."""
        return self._decoder.num_tokens

    def push(self, output: EngineOutput) -> TextDelta:
        """Take the engine's tokens; those after the end count for nothing."""
        delta = TextDelta()
        self._begin(output, delta)
        if self.finish_reason is None:
            self._take(output, delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _begin(self, output: EngineOutput, delta: TextDelta) -> None:
        if self._echo is not None:
            prompt, self._echo = self._echo, None
            delta.text += self._tokenizer.decode(prompt, keep_special=self._rules.keep_special)
            delta.token_ids += prompt
            delta.logprobs += output.prompt_logprobs or [None] * len(prompt)
        if self._rules.max_tokens == 0:
            self.finish_reason = "length"

    def _take(self, output: EngineOutput, delta: TextDelta) -> None:
        num_before = self.num_tokens
        pieces = self._decoder.push(output.token_ids, last=output.finish_reason is not None)
        delta.text += join_text(pieces, keep_special=self._rules.keep_special)
        taken = self.num_tokens - num_before
        delta.token_ids += output.token_ids[:taken]
        delta.logprobs += (output.logprobs or [None] * taken)[:taken]
        if self._decoder.found_stop or output.finish_reason is FinishReason.STOP:
            self.finish_reason = "stop"
        elif output.finish_reason is not None:
            self.finish_reason = "length"
