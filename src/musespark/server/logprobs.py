"""Log-probabilities in OpenAI's two shapes."""

import math
from collections.abc import Iterable, Sequence

from musespark.chat.tokenizer import Tokenizer
from musespark.engine.request import TokenLogprobs
from musespark.server.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from musespark.server.protocol.completions import CompletionLogprobs

# JSON has no infinity; this is what OpenAI sends for "impossible".
_LOWEST = -9999.0


class TokenTexts:
    """What single tokens look like."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = tokenizer.vocabulary() or []
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        """The token as text; U+FFFD for part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.decode([token_id], keep_special=True)
        return text

    def bytes_of(self, token_id: int) -> list[int] | None:
        """The token's bytes, of which clients can put characters together.

        None where they are not known: part of a character, in a vocabulary that is not made of
        bytes.
        """
        if token_id < len(self._vocabulary) and self._vocabulary[token_id]:
            return list(self._vocabulary[token_id])
        text = self[token_id]
        return None if "\ufffd" in text else list(text.encode())


def finite(logprob: float) -> float:
    """`logprob`, as JSON can have it."""
    return logprob if math.isfinite(logprob) else _LOWEST


def chat_logprobs(
    tokens: Iterable[tuple[int, TokenLogprobs]], texts: TokenTexts, num_top: int
) -> ChoiceLogprobs:
    """The shape of chat completions."""
    content = [
        TokenLogprob(
            token=texts[token_id],
            logprob=finite(logprobs.logprob),
            bytes=texts.bytes_of(token_id),
            top_logprobs=[
                TopLogprob(token=texts[top], logprob=finite(value), bytes=texts.bytes_of(top))
                for top, value in logprobs.top[:num_top]
            ],
        )
        for token_id, logprobs in tokens
    ]
    return ChoiceLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    texts: TokenTexts,
    num_top: int,
    offset: int,
) -> CompletionLogprobs:
    """The shape of plain completions; `offset` is where in the text the first token begins."""
    names = [texts[token_id] for token_id in token_ids]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in logprobs],
        tokens=names,
        top_logprobs=[_top(entry, texts, num_top) for entry in logprobs],
    )


def _top(entry: TokenLogprobs | None, texts: TokenTexts, num_top: int) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, value in entry.top[:num_top]:
        # Parts of characters look alike; the most likely one stays.
        top.setdefault(texts[token_id], finite(value))
    return top
