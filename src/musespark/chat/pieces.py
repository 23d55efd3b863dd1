"""The alphabet the chat package speaks: stretches of text, and special tokens apart from them.

A person may type `<|eot|>`, and a model may quote it. As text it means nothing; as a token it
ends the turn. Joining both into one string loses that difference for good, so text between the
tokenizer, the templates and the parser travels as pieces.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

START = "<|start|>"
MESSAGE = "<|message|>"
END_OF_MESSAGE = "<|eom|>"
END_OF_TURN = "<|eot|>"
BEGIN_OF_TEXT = "<|begin_of_text|>"
END_OF_TEXT = "<|end_of_text|>"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of ordinary text, or the name of one special token."""

    text: str
    is_special: bool = False


def special_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """What finds any of the special tokens `names`; with no names it finds nothing."""
    # The longest first: a name may begin with another name.
    alternatives = sorted(map(re.escape, names), key=len, reverse=True)
    return re.compile("|".join(alternatives) if alternatives else r"(?!)")


def split_pieces(text: str, pattern: re.Pattern[str]) -> Iterator[Piece]:
    """Cut trusted `text` at every special token (from `special_pattern`) named in it."""
    position = 0
    for match in pattern.finditer(text):
        if match.start() > position:
            yield Piece(text[position : match.start()])
        yield Piece(match.group(), is_special=True)
        position = match.end()
    if position < len(text):
        yield Piece(text[position:])


def join_text(pieces: Iterable[Piece], *, keep_special: bool = True) -> str:
    """The pieces as one string, for people to read."""
    return "".join(piece.text for piece in pieces if keep_special or not piece.is_special)
