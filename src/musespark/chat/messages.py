"""Messages of a conversation, checked once where they come in.

The shapes are OpenAI's. Everything after this file can rely on them: text is one string, every
tool result knows its tool's name, and the arguments of every past call are a JSON object.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from musespark.chat.strict_json import dump_json, load_json
from musespark.chat.tools import ToolCall, check_tool_name
from musespark.errors import RequestError

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: tuple[Role, ...] = get_args(Role)

# How clients label parts that are no text.
_MEDIA = ("image", "audio", "video", "file")


@dataclass(frozen=True, slots=True)
class Message:
    """One message. What a role cannot have is empty."""

    role: Role
    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    """Of a tool result: the tool. Of other messages: an optional name of the author."""

    def for_template(self) -> dict[str, Any]:
        """The shape chat templates expect: arguments of calls are objects, not text."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": load_json(call.arguments)},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message


def parse_messages(raw: Sequence[Any]) -> tuple[Message, ...]:
    """The messages of a request.

    Raises:
        RequestError: naming the message and the field.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str) or not raw:
        raise RequestError("messages: must be a list with at least one message.")
    messages = [_parse_message(value, f"messages[{index}]") for index, value in enumerate(raw)]
    return tuple(_with_tool_names(messages))


def _parse_message(raw: Any, where: str) -> Message:
    if isinstance(raw, Message):
        return raw
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where}: must be an object.")
    role = _role(raw.get("role"), f"{where}.role")
    if raw.get("audio") is not None:
        raise _text_only(f"{where}.audio")
    if role != "assistant":
        return Message(
            role,
            _content(raw.get("content"), f"{where}.content"),
            tool_call_id=_string(raw, "tool_call_id", where),
            name=_string(raw, "name", where),
        )
    reasoning_field = "reasoning_content" if raw.get("reasoning_content") else "reasoning"
    reasoning = _string(raw, reasoning_field, where)
    calls = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls")
    content = raw.get("content")
    if content is None and (calls or reasoning):
        content = ""
    return Message(role, _content(content, f"{where}.content"), reasoning, calls)


def _role(raw: Any, where: str) -> Role:
    if raw == "developer":  # OpenAI's newer name for instructions from the application
        return "system"
    for role in _ROLES:
        if raw == role:
            return role
    raise RequestError(f"{where}: must be one of {', '.join(_ROLES)}, found {raw!r}.")


def _string(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{where}.{key}: must be a string, found {type(value).__name__}.")
    return value


def _content(raw: Any, where: str) -> str:
    """The text of a content field: a string, or a list of text parts joined as they are."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, Sequence):
        raise RequestError(f"{where}: must be a string or a list of text parts.")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(raw))


def _part(raw: Any, where: str) -> str:
    kind = raw.get("type") if isinstance(raw, Mapping) else None
    if kind == "text" and isinstance(raw.get("text"), str):
        return str(raw["text"])
    if isinstance(kind, str) and any(medium in kind for medium in _MEDIA):
        raise _text_only(where)
    raise RequestError(f'{where}: must be {{"type": "text", "text": "..."}}.')


def _text_only(where: str) -> RequestError:
    return RequestError(
        f"{where}: this server runs the text model only. Send text, without images, audio, video "
        "or files."
    )


def _tool_calls(raw: Any, where: str) -> tuple[ToolCall, ...]:
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise RequestError(f"{where}: must be a list.")
    return tuple(_tool_call(value, f"{where}[{index}]") for index, value in enumerate(raw))


def _tool_call(raw: Any, where: str) -> ToolCall:
    if isinstance(raw, ToolCall):
        return raw
    function = raw.get("function") if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: must be an object with a name and arguments.")
    name = check_tool_name(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    try:
        # Clients send no arguments as an empty string.
        value = load_json(arguments or "{}") if isinstance(arguments, str) else arguments or {}
        text = dump_json(value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}.function.arguments: not JSON: {error}.") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}.function.arguments: must be a JSON object.")
    return ToolCall(_string(raw, "id", where), name, text)


def _with_tool_names(messages: Iterable[Message]) -> Iterable[Message]:
    """The messages, each tool result with its tool's name, which the wire format needs."""
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        names.update((call.id, call.name) for call in message.tool_calls)
        if message.role != "tool":
            yield message
            continue
        where = f"messages[{index}]"
        name = message.name or names.get(message.tool_call_id)
        if not name:
            raise RequestError(
                f"{where}.tool_call_id: no earlier message calls a tool with the id "
                f"{message.tool_call_id!r}. Keep the assistant's tool_calls in the conversation, "
                "or give the result the tool's name."
            )
        yield replace(message, name=check_tool_name(name, f"{where}.name"))
