"""Tokens of one output -> text, up to its first stop text.

Shared by whoever shows text: `LLM` and the servers. Knows nothing of engines.
"""

from collections.abc import Iterable, Sequence

from musespark.chat.pieces import Piece
from musespark.chat.tokenizer import Tokenizer
from musespark.llm.stop_text import StopTextFinder


class OutputDecoder:
    """Decodes as tokens arrive, and holds back what may be the beginning of a stop text.

    A stop text lies within text: it never reaches over a special token.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Text of the first `min_tokens` tokens is not searched for the texts in `stop`."""
        self._decoder = tokenizer.stream()
        self._stops = StopTextFinder(stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Tokens taken, up to the one that completed a stop text."""

    @property
    def found_stop(self) -> bool:
        """Whether a stop text has ended the output; nothing comes out any more then."""
        return self._stops.found

    def push(self, token_ids: Iterable[int], *, last: bool = False) -> list[Piece]:
        """What can be shown now; with `last`, also what was held back."""
        shown: list[Piece] = []
        for token_id in token_ids:
            if self.found_stop:
                return shown
            self.num_tokens += 1
            shown += self._search(self._decoder.push(token_id))
        if last and not self.found_stop:
            shown += self._search(self._decoder.flush())
            shown += _text(self._stops.flush())
        return shown

    def _search(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces up to a stop text, less what may begin one."""
        shown: list[Piece] = []
        for piece in pieces:
            if self.found_stop:
                break
            if piece.is_special:
                shown += [*_text(self._stops.flush()), piece]
            elif self.num_tokens <= self._min_tokens:
                shown.append(piece)
            else:
                shown += _text(self._stops.push(piece.text))
        return shown


def _text(text: str) -> list[Piece]:
    return [Piece(text)] if text else []
