"""Token ids -> text, one token at a time, without ever showing half a character.

A character of several bytes may be spread over several tokens. What is emitted here never ends
inside one, and the emitted texts joined are exactly the text of all tokens decoded at once.
"""

import codecs
from collections.abc import Mapping
from typing import Self

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from musespark.chat.pieces import Piece

# Byte-level vocabularies write each byte as one printable character: bytes that print as themselves
# stay, the others move up to U+0100 and on, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_MOVED = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF: Mapping[str, int] = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + place): byte for place, byte in enumerate(_MOVED)},
}


class ByteTable:
    """The bytes of every token of a byte-level vocabulary."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """The table of `backend`; entries are made when first asked for."""
        self._backend = backend
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Self | None:
        """The table of `backend`, or None when its vocabulary is not byte-level."""
        return cls(backend) if isinstance(backend.decoder, ByteLevel) else None

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(self._backend.id_to_token(token_id))
        return known

    def _bytes_of(self, token: str | None) -> bytes:
        try:
            return bytes(_BYTE_OF[character] for character in token or "")
        except KeyError:  # an added token, which is stored as the text it stands for
            return (token or "").encode()


class IncrementalDecoder:
    """Decodes the tokens of one sequence as they arrive."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_names: Mapping[int, str],
        byte_table: ByteTable | None,
    ) -> None:
        """Made by `Tokenizer.stream`; `byte_table` is None for a vocabulary of another kind."""
        self._special_names = special_names
        self._text: _ByteLevelText | _AnyText
        self._text = _ByteLevelText(byte_table) if byte_table else _AnyText(backend)

    def push(self, token_id: int) -> list[Piece]:
        """What can be shown now that `token_id` has arrived; often one piece, maybe none."""
        name = self._special_names.get(token_id)
        if name is not None:
            # Half a character before a special token will never be completed.
            return [*self.flush(), Piece(name, is_special=True)]
        text = self._text.push(token_id)
        return [Piece(text)] if text else []

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the sequence: U+FFFD for half a character."""
        text = self._text.flush()
        return [Piece(text)] if text else []


class _ByteLevelText:
    """Exact: the bytes of the tokens through an incremental UTF-8 decoder."""

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._table[token_id])

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _AnyText:
    """For vocabularies of any kind: the tokenizers library's own stream."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._stream.step(self._backend, token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        text = self._backend.decode(self._held, skip_special_tokens=False) if self._held else ""
        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=False)
        return text
