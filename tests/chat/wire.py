"""Turns written as text, for tests: `<|eot|>` is the token, `«eot»` the same characters typed."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from musespark.chat.events import Event
from musespark.chat.parser import TurnParser
from musespark.chat.pieces import Piece, special_pattern, split_pieces

_NAMES = ("begin_of_text", "end_of_text", "eom", "eot", "pad", "start", "message")
SPECIAL = special_pattern(f"<|{name}|>" for name in _NAMES)


def wire(text: str) -> list[Piece]:
    """The pieces of a turn."""
    return [
        Piece(re.sub(r"«(\w+)»", r"<|\1|>", piece.text), piece.is_special)
        for piece in split_pieces(text, SPECIAL)
    ]


def one_character_at_a_time(pieces: Iterable[Piece]) -> list[Piece]:
    return [
        part
        for piece in pieces
        for part in ([piece] if piece.is_special else map(Piece, piece.text))
    ]


def cut_at(pieces: Iterable[Piece], cuts: Sequence[int]) -> list[Piece]:
    """The same text in other stretches: each text is cut at `cuts` (taken modulo its length)."""
    parts: list[Piece] = []
    for piece in pieces:
        if piece.is_special:
            parts.append(piece)
            continue
        places = sorted({0, len(piece.text), *(cut % (len(piece.text) + 1) for cut in cuts)})
        parts += [Piece(piece.text[a:b]) for a, b in itertools.pairwise(places)]
    return parts


def counted_ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call_{next(counter)}"


def feed_one_by_one(parser: TurnParser, pieces: Iterable[Piece]) -> list[Event]:
    """Each piece in a call of its own, then the end of tokens."""
    events = [event for piece in pieces for event in parser.feed([piece])]
    return [*events, *parser.finish()]


def call_body(name: str, *parameters: tuple[str, str]) -> str:
    values = "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in parameters
    )
    return (
        f'<atem:function_calls>\n<atem:invoke name="{name}">\n{values}'
        "</atem:invoke>\n</atem:function_calls>"
    )
