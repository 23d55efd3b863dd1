"""What a request's output must look like: JSON, a pattern, or one of several texts."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from musespark.errors import RequestError


class GrammarKind(StrEnum):
    """What `StructuredOutput.body` holds."""

    JSON_OBJECT = "json_object"
    """Nothing: any JSON object will do."""
    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole text matches."""
    CHOICE = "choice"
    """The texts to choose from, as a JSON list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerScope:
    """Which part of a chat turn the user sees as the answer, said in token ids.

    A turn is a row of messages: start, header, message mark, body, end. Only the body of a message
    with one of the `headers` is constrained; reasoning and tool calls are free. Once the answer is
    complete, only `turn_end_ids` may follow, so that the turn holds one answer.
    """

    start_id: int
    """Opens a header."""
    message_id: int
    """Ends a header and opens a body."""
    message_end_ids: tuple[int, ...]
    """End a body; the turn may go on."""
    turn_end_ids: tuple[int, ...]
    """End a body and the turn."""
    headers: tuple[tuple[int, ...], ...]
    """What stands between start and message mark where the body is an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on one request's output."""

    kind: GrammarKind
    body: str = ""
    """The schema, the pattern, or the choices; see `GrammarKind`."""
    scope: AnswerScope | None = None
    """The part of the output that is constrained; None: all of it, from the first token on."""

    @classmethod
    def json_object(cls, scope: AnswerScope | None = None) -> Self:
        """Any JSON object."""
        return cls(kind=GrammarKind.JSON_OBJECT, scope=scope)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, scope: AnswerScope | None = None) -> Self:
        """JSON that fits `schema`."""
        body = schema if isinstance(schema, str) else json.dumps(schema)
        return cls(kind=GrammarKind.JSON_SCHEMA, body=body, scope=scope)

    @classmethod
    def regex(cls, pattern: str, scope: AnswerScope | None = None) -> Self:
        """A text that `pattern` matches as a whole."""
        return cls(kind=GrammarKind.REGEX, body=pattern, scope=scope)

    @classmethod
    def choice(cls, choices: list[str], scope: AnswerScope | None = None) -> Self:
        """One of `choices`."""
        if not choices or not all(isinstance(text, str) and text for text in choices):
            raise RequestError("choice: must be a list of at least one text, none of them empty.")
        return cls(kind=GrammarKind.CHOICE, body=json.dumps(choices), scope=scope)
