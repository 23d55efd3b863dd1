"""What the parser reports while a turn is being written."""

from collections.abc import Iterable
from dataclasses import dataclass

from musespark.chat.messages import Message
from musespark.chat.tools import ToolCall


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallComplete:
    """A whole tool call; `index` counts the calls of the turn."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallBroken:
    """Text addressed to a tool that is no well-formed call, and why. Nothing of it is a call."""

    recipient: str
    text: str
    reason: str
    is_truncated: bool
    """The turn was cut off inside this call; with more tokens it might have been whole."""


@dataclass(frozen=True, slots=True)
class StrayText:
    """Text that is no part of the assistant's turn, such as a message the model made up for
    another role."""

    header: str
    text: str


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The model closed its turn. Whatever follows is ignored."""


Event = ReasoningDelta | ContentDelta | CallComplete | CallBroken | StrayText | TurnEnd


@dataclass(frozen=True, slots=True)
class Turn:
    """A whole turn: its events, collected."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    broken_calls: tuple[CallBroken, ...] = ()
    stray_texts: tuple[StrayText, ...] = ()
    is_complete: bool = False
    """The model closed the turn itself."""

    def to_message(self) -> Message:
        """The turn as a message of the conversation, for the prompt of the next one."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


def collect(events: Iterable[Event]) -> Turn:
    """The turn that `events` tell of: what a client that joins the deltas ends up with."""
    events = list(events)
    return Turn(
        reasoning="".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        content="".join(event.text for event in events if isinstance(event, ContentDelta)),
        tool_calls=tuple(event.call for event in events if isinstance(event, CallComplete)),
        broken_calls=tuple(event for event in events if isinstance(event, CallBroken)),
        stray_texts=tuple(event for event in events if isinstance(event, StrayText)),
        is_complete=any(isinstance(event, TurnEnd) for event in events),
    )
