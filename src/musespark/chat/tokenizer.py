"""Text <-> token ids, from the tokenizer.json of a checkpoint.

Owns which strings are special tokens and when typed text may become one:

- `encode` and `encode_pieces` never turn typed text into a special token, so the content of a
  message cannot end its own turn or open another one;
- `encode_prompt` is for raw completion prompts, whose author writes the whole wire format: there,
  as in transformers, `<|eot|>` is the token, and the tokenizer's own first token is added.

Knows nothing about messages, and needs neither torch nor transformers.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers

from musespark.chat.detokenizer import ByteTable, IncrementalDecoder
from musespark.chat.pieces import BEGIN_OF_TEXT, END_OF_TEXT, END_OF_TURN, Piece, join_text
from musespark.config.strict import read_json_object
from musespark.errors import CheckpointError, ConfigError, RequestError

STILL_WORKS = "The model itself still runs on token ids (--token-ids); only text needs a tokenizer."

# The config's name of a special token -> what this model family calls it.
_FAMILY_NAMES = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": "<|pad|>"}


class Tokenizer:
    """One checkpoint's tokenizer. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any] | None = None,
        where: str = "tokenizer.json",
    ) -> None:
        """`settings` is the content of tokenizer_config.json; `where` is named in errors."""
        self._where = where
        self._settings = dict(settings or {})
        self._raw_backend = backend
        self._add_configured_tokens()
        # The same tokenizer, for which the text of a special token is only text. A copy, because
        # the switch is a state of the tokenizer and not of the call.
        self._content_backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._content_backend.encode_special_tokens = True
        self.special_ids: dict[str, int] = {
            token.content: index
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        """Every special token by name."""
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        """One more than the largest token id. The model's own vocabulary may be padded further."""

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read tokenizer.json, and tokenizer_config.json where there is one.

        Raises:
            CheckpointError: no tokenizer.json, or one of the two files is damaged.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file. {STILL_WORKS}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise CheckpointError(
                f"{path}: not a tokenizer that can be read: {error}. Download or save it again. "
                f"{STILL_WORKS}"
            ) from None
        # A saved tokenizer may carry the truncation and padding of its training.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, read_tokenizer_settings(folder), str(path))

    # --- text -> ids

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as plain content: no special tokens, whatever it spells."""
        return self._encode(self._content_backend, text, add_special_tokens=False)

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """The ids of a rendered prompt: text as content, special tokens as themselves."""
        token_ids: list[int] = []
        for piece in pieces:
            if piece.is_special:
                token_ids.append(self.special_id(piece.text))
            else:
                token_ids.extend(self.encode(piece.text))
        return token_ids

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt, as transformers would give them.

        Special tokens spelled in `text` are honoured, so never pass what an untrusted person
        typed: render messages through the chat template instead.
        """
        token_ids = self._encode(self._raw_backend, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._settings.get("add_bos_token"):
            first = self.special_id(self.named_token("bos_token"))
            if token_ids[:1] != [first]:
                token_ids.insert(0, first)
        return token_ids

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # how the library refuses a string that is no Unicode text
            _check_unicode(text)
            raise

    # --- ids -> text

    def decode(self, token_ids: Iterable[int], *, keep_special: bool = False) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return join_text(self.decode_pieces(token_ids), keep_special=keep_special)

    def decode_pieces(self, token_ids: Iterable[int]) -> list[Piece]:
        """The pieces of `token_ids`, special tokens apart from text."""
        decoder = self.stream()
        pieces = [piece for token_id in token_ids for piece in decoder.push(token_id)]
        return [*pieces, *decoder.flush()]

    def vocabulary(self) -> list[bytes] | None:
        """The bytes of every token in order of id, none for special tokens and for gaps.

        None when the vocabulary is not byte-level, so that tokens have no bytes of their own.
        """
        table = self._byte_table
        if table is None:
            return None
        return [b"" if i in self._names_by_id else table[i] for i in range(self.vocab_size)]

    def stream(self) -> IncrementalDecoder:
        """A decoder that is fed the tokens of one sequence one by one."""
        return IncrementalDecoder(self._raw_backend, self._names_by_id, self._byte_table)

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        return {index: name for name, index in self.special_ids.items()}

    @cached_property
    def _byte_table(self) -> ByteTable | None:
        return ByteTable.of(self._raw_backend)

    # --- special tokens

    def special_id(self, name: str) -> int:
        """The id of the special token `name`.

        Raises:
            CheckpointError: this tokenizer has no such special token.
        """
        try:
            return self.special_ids[name]
        except KeyError:
            raise CheckpointError(
                f"{self._where}: no special token {name!r}. Chat in this model family needs it; "
                "raw prompts and token ids still work."
            ) from None

    def named_token(self, role: str) -> str:
        """The text of `bos_token`, `eos_token` or `pad_token`: configured, or the family's own.

        An empty string when the tokenizer has none.
        """
        configured = self._settings.get(role)
        if isinstance(configured, Mapping):  # an AddedToken written out as an object
            configured = configured.get("content")
        if isinstance(configured, str):
            return configured
        family_name = _FAMILY_NAMES.get(role, "")
        return family_name if family_name in self.special_ids else ""

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a turn. `<|eom|>` only ends a message, so it is not among them."""
        names = {END_OF_TURN, END_OF_TEXT, self.named_token("eos_token")}
        return frozenset(self.special_ids[name] for name in names if name in self.special_ids)

    def _add_configured_tokens(self) -> None:
        """Special tokens that tokenizer_config.json names and tokenizer.json lacks."""
        for index, name in _configured_special_tokens(self._settings):
            if self._raw_backend.token_to_id(name) is not None:
                continue
            self._raw_backend.add_special_tokens([tokenizers.AddedToken(name, special=True)])
            given = self._raw_backend.token_to_id(name)
            if given != index:
                raise CheckpointError(
                    f"{self._where}: tokenizer_config.json gives {name!r} the id {index}, but "
                    f"after tokenizer.json the next free id is {given}. The two files do not "
                    f"belong together. {STILL_WORKS}"
                )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds half of a surrogate pair at character {error.start}, which is no "
            "Unicode text. Send the whole character."
        ) from None


def _configured_special_tokens(settings: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The (id, name) of the special tokens in tokenizer_config.json, by rising id."""
    try:
        return sorted(
            (int(index), str(token["content"]))
            for index, token in (settings.get("added_tokens_decoder") or {}).items()
            if token.get("special")
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            "tokenizer_config.json: added_tokens_decoder must map ids to tokens with a content. "
            f"{STILL_WORKS}"
        ) from None


def read_tokenizer_settings(folder: str | Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty when there is no such file."""
    path = Path(folder) / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        return read_json_object(path)
    except ConfigError as error:
        raise CheckpointError(f"{error} {STILL_WORKS}") from None
