"""Messages -> prompt, through the chat template of the checkpoint.

Templates are programs that come with a download, so they run in jinja's sandbox: they see plain
data, and can reach neither files nor other templates. What the messages say stays text whatever
it spells: only the template itself can write special tokens.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, Self

import jinja2

from musespark.chat.messages import Message
from musespark.chat.pieces import Piece, special_pattern, split_pieces
from musespark.chat.sandbox import make_environment
from musespark.chat.tokenizer import Tokenizer, read_tokenizer_settings
from musespark.chat.tools import Tool
from musespark.errors import CheckpointError, RequestError

REASONING_EFFORTS = ("low", "medium", "high", "xhigh")
DEFAULT_REASONING_EFFORT = "xhigh"

# What a request may not set through its own template variables.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class ChatTemplate:
    """One compiled template, and what it needs to know about the tokenizer."""

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        where: str = "chat template",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile `source`; `where` names it in errors, `clock` is what `strftime_now` reads.

        Raises:
            CheckpointError: the template has a syntax error.
        """
        self._source = source
        self._special = special_pattern(tokenizer.special_ids)
        self._guard = _Guard(tokenizer.special_ids)
        self._tokens = {
            role: tokenizer.named_token(role) for role in ("bos_token", "eos_token", "pad_token")
        }
        try:
            self._template = make_environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{where}: line {error.lineno}: {error.message}.") from None

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> Self:
        """The template of a checkpoint; the built-in one where the checkpoint has none.

        chat_template.jinja comes before the chat_template in tokenizer_config.json.
        """
        path = Path(folder) / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"), tokenizer, str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}.") from None
        source = _configured_template(read_tokenizer_settings(folder))
        if source is not None:
            return cls(
                source, tokenizer, f"{Path(folder) / 'tokenizer_config.json'}: chat_template"
            )
        return cls.built_in(tokenizer)

    @classmethod
    def built_in(cls, tokenizer: Tokenizer) -> Self:
        """The wire format of this model family, for checkpoints without a template."""
        file = resources.files("musespark.chat") / "default_template.jinja"
        return cls(file.read_text(encoding="utf-8"), tokenizer, file.name)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reasoning_effort: str = DEFAULT_REASONING_EFFORT,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[Piece, ...]:
        """The conversation as text and special tokens.

        Args:
            messages: from `parse_messages`.
            tools: from `parse_tools`.
            reasoning_effort: low, medium, high or xhigh.
            add_generation_prompt: end where the assistant's next turn begins.
            continue_final_message: end inside the last message, which must be the assistant's, so
                that the model goes on writing it; takes the place of the generation prompt.
            variables: further JSON values for the template.

        Raises:
            RequestError: the template refuses this conversation, or a value is not allowed.
        """
        if reasoning_effort not in REASONING_EFFORTS:
            raise RequestError(
                f"reasoning_effort: must be one of {', '.join(REASONING_EFFORTS)}, "
                f"found {reasoning_effort!r}."
            )
        variables = _check_variables(variables or {})
        try:
            data = {
                **variables,
                "messages": [message.for_template() for message in messages],
                # Templates ask `if tools`, some of them `if tools is not none`.
                "tools": [tool.for_template() for tool in tools] or None,
            }
            marks = _unused_characters(self._source + json.dumps(data, ensure_ascii=False))
            guard, cut = next(marks), next(marks)
            data = self._guard.apply(data, guard)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"The request holds values that are not JSON: {error}.") from None
        if continue_final_message:
            _mark_end(data["messages"], cut)
        text = self._render_text(
            {
                **self._tokens,
                **data,
                "reasoning_effort": reasoning_effort,
                # The name in the templates of this family's smaller sibling.
                "reasoning_strength": reasoning_effort,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        if continue_final_message:
            text = _cut_at(text, cut)
        pieces = split_pieces(text, self._special)
        return tuple(Piece(p.text.replace(guard, ""), p.is_special) for p in pieces)

    def _render_text(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template refuses this conversation: {error}") from None
        except Exception as error:  # a template can fail in any way that a program can
            raise RequestError(
                f"The chat template cannot render this conversation: {type(error).__name__}: "
                f"{error}"
            ) from None


def _configured_template(settings: Mapping[str, Any]) -> str | None:
    """The template in tokenizer_config.json: a string, or the `default` of a list of named ones."""
    configured = settings.get("chat_template")
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _check_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    for name in variables:
        if name in _RESERVED:
            raise RequestError(f"Template variables: {name!r} cannot be set.")
    return dict(variables)


def _unused_characters(text: str) -> Iterator[str]:
    """Characters for private use that `text` does not use."""
    used = set(text)
    return (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


class _Guard:
    """Breaks up every special token spelled in data, by a mark inside it.

    After rendering, what still reads as a special token is the template's own, and the marks are
    taken out of the rest.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._whole = special_pattern(names)
        # The beginning of a name at the end of one string could be completed by the next string.
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self._longest = max(map(len, self._beginnings), default=0)

    def apply(self, value: Any, mark: str) -> Any:
        """A plain copy of the JSON value `value`, guarded."""
        if isinstance(value, str):
            return self._guarded(value, mark)
        if isinstance(value, Mapping):
            return {self._guarded(key, mark): self.apply(item, mark) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self.apply(item, mark) for item in value]
        return value

    def _guarded(self, text: str, mark: str) -> str:
        text = self._whole.sub(lambda match: _insert_mark(match.group(), mark), text)
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return text[:-length] + _insert_mark(text[-length:], mark)
        return text


def _insert_mark(name: str, mark: str) -> str:
    return name[0] + mark + name[1:]


def _mark_end(messages: Sequence[dict[str, Any]], mark: str) -> None:
    """Put `mark` at the end of the text that is to be continued."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message must be the assistant's, without tool calls."
        )
    field = (
        "reasoning_content" if not last["content"] and "reasoning_content" in last else "content"
    )
    last[field] += mark


def _cut_at(text: str, mark: str) -> str:
    end = text.rfind(mark)
    if end < 0:
        raise RequestError(
            "continue_final_message: this model's chat template leaves out the last message."
        )
    return text[:end]
