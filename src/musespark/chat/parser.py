"""The assistant's turn, from pieces to reasoning, answer and tool calls, while it is written.

    <|start|> assistant to=self <|message|> body <|eom|> <|start|> assistant ... <|eot|>
              `---- header ---'             `body'

A state machine with one state for headers and one for each kind of body. Structure is only ever
read from special tokens, which arrive as pieces of their own: text that spells them, or spells a
tool call inside reasoning or an answer, is text. So reasoning and answers pass straight through;
headers and tool bodies are held until they are whole.

A body ends at `<|eom|>`, at `<|eot|>`, or where the next header starts, since models forget.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto

from musespark.chat.atem import AtemError, parse_body
from musespark.chat.events import (
    CallBroken,
    CallComplete,
    ContentDelta,
    Event,
    ReasoningDelta,
    StrayText,
    Turn,
    TurnEnd,
    collect,
)
from musespark.chat.pieces import (
    END_OF_MESSAGE,
    END_OF_TEXT,
    END_OF_TURN,
    MESSAGE,
    START,
    Piece,
)
from musespark.chat.tools import Tool, ToolCall, call_arguments

ASSISTANT = "assistant"

# Between two bodies of the same kind, so that their words do not run together.
_BODY_BREAK = "\n\n"


class State(Enum):
    """Where in the turn the parser is."""

    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    STRAY = auto()
    ENDED = auto()


_STATE_OF_RECIPIENT = {
    "": State.CONTENT,
    "user": State.CONTENT,
    "commentary": State.CONTENT,
    "self": State.REASONING,
}


def new_call_id() -> str:
    """An id for a tool call, unique across conversations."""
    return f"call_{secrets.token_hex(12)}"


class TurnParser:
    """Parses one turn. Feed it pieces, then call `finish` once."""

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        opening: Iterable[Piece] = (Piece(ASSISTANT),),
        call_id: Callable[[], str] = new_call_id,
    ) -> None:
        """Begin where the prompt ends.

        Args:
            tools: what may be called; their schemas type the arguments.
            opening: what the prompt has after its last `<|start|>`. By default the bare role; more
                when the prompt begins a call, or a message that the model is to continue.
            call_id: makes the ids of tool calls.
        """
        self.state = State.HEADER
        self.recipient = ""
        """To whom the current body speaks; empty where the header names nobody."""
        self._tools = tools
        self._call_id = call_id
        self._header = ""
        self._held: list[str] = []  # the body of a call or of a stray message, so far
        self._num_calls = 0
        self._written: set[State] = set()
        self._needs_break = False
        for piece in opening:
            for _ in self._step(piece):
                pass  # the client has what the prompt says

    @property
    def is_ended(self) -> bool:
        """Whether the model has closed its turn."""
        return self.state is State.ENDED

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        """What `pieces` add to the turn."""
        return [event for piece in pieces for event in self._step(piece)]

    def finish(self, *, is_truncated: bool = True) -> list[Event]:
        """What was still held when the tokens ended.

        `is_truncated` is False when the model did stop by itself, and only the stop token was not
        fed (an engine may keep it).
        """
        events = list(self._end_body(is_truncated=is_truncated))
        if not is_truncated and not self.is_ended:
            events.append(TurnEnd())
        self.state = State.ENDED
        return events

    # --- one piece

    def _step(self, piece: Piece) -> Iterator[Event]:
        if self.state is State.ENDED:
            return
        if not piece.is_special:
            yield from self._text(piece.text)
        elif piece.text in (END_OF_TURN, END_OF_TEXT):
            yield from self._end_body(is_truncated=False)
            yield TurnEnd()
            self.state = State.ENDED
        elif piece.text in (START, END_OF_MESSAGE):
            yield from self._end_body(is_truncated=False)
            self.state, self._header = State.HEADER, ""
        elif piece.text == MESSAGE and self.state is State.HEADER:
            self._begin_body(*_parse_header(self._header))
        elif self.state is State.CALL:
            # An argument is exactly what the model wrote. Elsewhere, a token without a meaning
            # there (padding, a stray marker) is not for people to see.
            self._held.append(piece.text)

    def _text(self, text: str) -> Iterator[Event]:
        if self.state is State.HEADER:
            self._header += text
            answer = _answer_without_header(self._header)
            if answer:
                self._begin_body(ASSISTANT, "")
                yield from self._show(answer)
        elif self.state in (State.CALL, State.STRAY):
            self._held.append(text)
        else:
            yield from self._show(text)

    def _show(self, text: str) -> Iterator[Event]:
        if self._needs_break:
            text = _BODY_BREAK + text
        self._needs_break = False
        self._written.add(self.state)
        yield ReasoningDelta(text) if self.state is State.REASONING else ContentDelta(text)

    # --- one message

    def _begin_body(self, role: str, recipient: str) -> None:
        self.recipient = recipient
        if role == ASSISTANT:
            self.state = _STATE_OF_RECIPIENT.get(recipient, State.CALL)
            self._needs_break = self.state in self._written
        else:
            self.state = State.STRAY

    def _end_body(self, *, is_truncated: bool) -> Iterator[Event]:
        body = "".join(self._held)
        self._held.clear()
        if self.state is State.CALL:
            yield from self._end_call(body, is_truncated=is_truncated)
        elif self.state is State.STRAY:
            yield StrayText(self._header, body)
        elif self.state is State.HEADER and _is_stray(self._header):
            yield StrayText("", self._header)

    def _end_call(self, body: str, *, is_truncated: bool) -> Iterator[Event]:
        try:
            invocations = parse_body(body)
        except AtemError as error:
            yield CallBroken(self.recipient, body, str(error), is_truncated)
            return
        for invocation in invocations:
            try:
                arguments = call_arguments(invocation, self._tools)
            except AtemError as error:
                yield CallBroken(self.recipient, invocation.text, str(error), is_truncated=False)
                continue
            call = ToolCall(self._call_id(), invocation.name, arguments)
            yield CallComplete(self._num_calls, call)
            self._num_calls += 1


def _parse_header(header: str) -> tuple[str, str]:
    """The role and the recipient ("" for none) of `role[ to=recipient]`."""
    words = header.split()
    recipients = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    # A model that forgets `<|start|>` may also forget the role.
    role = words[0] if words and not words[0].startswith("to=") else ASSISTANT
    return role, recipients[0] if recipients else ""


def _answer_without_header(header: str) -> str:
    """The answer in `header`, when it has turned out not to be a header.

    A model that is not well trained may answer right after `<|start|>assistant`.
    """
    rest = header.removeprefix(ASSISTANT)
    if rest == header:
        return ""
    word = rest.lstrip()
    may_be_header = word.startswith("to=") or "to=".startswith(word)
    return "" if may_be_header and (rest != word or not word) else rest


def _is_stray(header: str) -> bool:
    """Whether a header that never led to a body was no header, not even half of one."""
    words = header.split()
    first = words[0] if words else ""
    begins_well = first.startswith("to=") or any(w.startswith(first) for w in (ASSISTANT, "to="))
    return not begins_well or len(words) > 2


def parse_turn(
    pieces: Iterable[Piece],
    tools: Sequence[Tool] = (),
    *,
    opening: Iterable[Piece] = (Piece(ASSISTANT),),
    call_id: Callable[[], str] = new_call_id,
    is_truncated: bool = True,
) -> Turn:
    """A whole turn at once; the arguments are those of `TurnParser` and `finish`."""
    parser = TurnParser(tools, opening, call_id)
    return collect([*parser.feed(pieces), *parser.finish(is_truncated=is_truncated)])
