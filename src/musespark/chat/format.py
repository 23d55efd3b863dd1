"""Tokenizer, template and parser of one checkpoint together: messages in, events out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from musespark.chat.atem import call_prefix
from musespark.chat.messages import Message, parse_messages
from musespark.chat.parser import TurnParser
from musespark.chat.pieces import (
    END_OF_MESSAGE,
    END_OF_TURN,
    MESSAGE,
    START,
    Piece,
    join_text,
)
from musespark.chat.template import DEFAULT_REASONING_EFFORT, ChatTemplate
from musespark.chat.tokenizer import Tokenizer
from musespark.chat.tools import Tool, ToolCall, ToolChoice, parse_tools
from musespark.errors import RequestError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]

    @property
    def text(self) -> str:
        """For people to read; encoding it again would not be safe."""
        return join_text(self.pieces)

    @property
    def opening(self) -> tuple[Piece, ...]:
        """What follows the last `<|start|>`: where the model, and the parser, go on.

        Empty when the last message is closed, so that the model has to open its turn itself.
        """
        for i in range(len(self.pieces) - 1, -1, -1):
            if self.pieces[i].is_special and self.pieces[i].text in _BOUNDARIES:
                return self.pieces[i + 1 :] if self.pieces[i] == _START else ()
        return ()


_START = Piece(START, is_special=True)
_MESSAGE = Piece(MESSAGE, is_special=True)
_BOUNDARIES = (START, END_OF_MESSAGE, END_OF_TURN)


class ChatFormat:
    """How one checkpoint writes conversations."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises CheckpointError when the tokenizer lacks a token of the wire format."""
        self.tokenizer = tokenizer
        self.template = template
        for name in (START, MESSAGE, END_OF_MESSAGE, END_OF_TURN):
            tokenizer.special_id(name)

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer | None = None) -> Self:
        """Read a checkpoint's files; a tokenizer that is there already is used again."""
        tokenizer = tokenizer or Tokenizer.from_folder(folder)
        return cls(tokenizer, ChatTemplate.from_folder(folder, tokenizer))

    def prompt(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        reasoning_effort: str = DEFAULT_REASONING_EFFORT,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        forced: Sequence[Piece] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render a conversation; see `ChatTemplate.render`.

        `forced` is how the assistant's turn must begin, from `forced_openings`.
        """
        if forced and (continue_final_message or not add_generation_prompt):
            raise RequestError(
                "tool_choice: a call can only be asked for at the beginning of a new turn."
            )
        pieces = self.template.render(
            parse_messages(messages),
            parse_tools(tools),
            reasoning_effort=reasoning_effort,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        pieces = (*pieces, *forced)
        return Prompt(pieces, tuple(self.tokenizer.encode_pieces(pieces)))

    def prompt_token_ids(
        self, messages: Sequence[Message | Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """The token ids of `prompt(messages, **options)`."""
        return list(self.prompt(messages, **options).token_ids)

    def parser(
        self, prompt: Prompt | None = None, tools: Sequence[Tool | Mapping[str, Any]] = ()
    ) -> TurnParser:
        """A parser for the turn that follows `prompt`; by default, a turn from its beginning."""
        declared = parse_tools(tools)
        return TurnParser(declared, prompt.opening) if prompt else TurnParser(declared)

    def forced_openings(self, choice: ToolChoice) -> list[tuple[Piece, ...]]:
        """How a turn may begin after `<|start|>assistant`, when it must call a tool.

        One opening for each tool it may choose. With one, append it to the prompt; with several,
        constrain the decoding to them. Without an obligation the list is empty.
        """
        return [self._call_opening(name) for name in choice.names]

    def _call_opening(self, name: str) -> tuple[Piece, ...]:
        # The whitespace between tags is as the checkpoint's own template has it.
        start = call_prefix(name)
        call = Message("assistant", tool_calls=(ToolCall("", name, "{}"),))
        pieces = self.template.render(
            (Message("user", "-"), call), (Tool(name),), add_generation_prompt=False
        )
        invoke = f'<atem:invoke name="{name}">'
        for before, piece in pairwise(pieces):
            if before == _MESSAGE and piece.text.startswith("<atem:") and invoke in piece.text:
                start = piece.text[: piece.text.index(invoke) + len(invoke)]
        return (Piece(f" to={name}"), _MESSAGE, Piece(start))
