"""One output of a chat request, from tokens to what the client sees of the assistant's turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from musespark.chat.detokenizer import IncrementalDecoder
from musespark.chat.events import CallBroken, CallComplete, ContentDelta, Event, ReasoningDelta
from musespark.chat.parser import State, TurnParser
from musespark.chat.tools import ToolCall
from musespark.engine.client import EngineOutput
from musespark.engine.request import FinishReason, TokenLogprobs
from musespark.llm.stop_text import StopTextFinder

TurnFinish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """What ends a turn, beside the model."""

    stop: tuple[str, ...] = ()
    """Texts that end the answer. Reasoning and tool calls are not searched for them."""
    min_tokens: int = 0
    """The text of so many tokens is not searched for stop texts."""
    may_call: bool = True
    """Whether tool calls count; if not, they are reported as broken."""
    one_call: bool = False
    """End the turn after the first tool call."""


@dataclass(slots=True)
class TurnDelta:
    """What some tokens added to a turn."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    broken: list[CallBroken] = field(default_factory=list)
    answer_tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    """The tokens of the answer with their log-probabilities, where those were asked for."""
    finish_reason: TurnFinish | None = None

    def add(self, later: "TurnDelta") -> None:
        """Append what came later."""
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls
        self.broken += later.broken
        self.answer_tokens += later.answer_tokens
        self.finish_reason = later.finish_reason


class TurnReader:
    """Reads one turn while it is written."""

    def __init__(
        self, decoder: IncrementalDecoder, parser: TurnParser, rules: TurnRules = TurnRules()
    ) -> None:
        self._decoder, self._parser, self._rules = decoder, parser, rules
        self._stops = StopTextFinder(rules.stop)
        self._has_calls = False
        self.finish_reason: TurnFinish | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def push(self, output: EngineOutput) -> TurnDelta:
        """Take the engine's tokens; those after the turn's end count for nothing."""
        delta = TurnDelta()
        logprobs: Sequence[TokenLogprobs | None]
        logprobs = output.logprobs or [None] * len(output.token_ids)
        for token_id, token_logprobs in zip(output.token_ids, logprobs, strict=True):
            if self.finish_reason is None:
                self._push_token(token_id, token_logprobs, delta)
        if output.finish_reason is not None and self.finish_reason is None:
            self._end(output.finish_reason, delta)
        delta.finish_reason = self.finish_reason
        return delta

    def _push_token(self, token_id: int, logprobs: TokenLogprobs | None, delta: TurnDelta) -> None:
        self.num_tokens += 1
        pieces = self._decoder.push(token_id)
        self._take(self._parser.feed(pieces), delta)
        if any(piece.is_special for piece in pieces):
            return
        if self._parser.state is State.REASONING:
            self.num_reasoning_tokens += 1
        elif self._parser.state is State.CONTENT and logprobs is not None:
            delta.answer_tokens.append((token_id, logprobs))

    def _take(self, events: Sequence[Event], delta: TurnDelta) -> None:
        for event in events:
            if self.finish_reason is not None:
                return
            if isinstance(event, ReasoningDelta):
                delta.reasoning += event.text
            elif isinstance(event, ContentDelta):
                delta.content += self._before_stop(event.text)
            elif isinstance(event, CallComplete):
                self._take_call(event, delta)
            elif isinstance(event, CallBroken):
                delta.broken.append(event)

    def _before_stop(self, text: str) -> str:
        if self.num_tokens <= self._rules.min_tokens:
            return text
        text = self._stops.push(text)
        if self._stops.found:
            self.finish_reason = "stop"
        return text

    def _take_call(self, event: CallComplete, delta: TurnDelta) -> None:
        if not self._rules.may_call:
            call = event.call
            reason = "the request does not allow tool calls"
            delta.broken.append(CallBroken(call.name, call.arguments, reason, is_truncated=False))
            return
        delta.calls.append((event.index, event.call))
        self._has_calls = True
        if self._rules.one_call:
            self.finish_reason = "tool_calls"

    def _end(self, reason: FinishReason, delta: TurnDelta) -> None:
        is_truncated = reason is not FinishReason.STOP
        self._take(self._parser.feed(self._decoder.flush()), delta)
        self._take(self._parser.finish(is_truncated=is_truncated), delta)
        if self.finish_reason is None:
            delta.content += self._stops.flush()
            self.finish_reason = "tool_calls" if self._has_calls else "stop"
            if is_truncated:
                self.finish_reason = "length"
