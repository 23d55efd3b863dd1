"""Tools: what may be called, what was called, and how arguments get their types.

On the wire a string argument is bare and any other is JSON, so only the tool's schema can tell
`12` the number from `12` the string. Nothing is repaired here: a value that does not read as its
type is an error with a reason.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from musespark.chat.atem import AtemError, Invocation
from musespark.chat.strict_json import dump_json, load_json
from musespark.errors import RequestError

# Recipients that are no tools: reasoning and the two spellings of the answer.
RESERVED_RECIPIENTS = ("self", "user", "commentary")

# A name stands bare in a header and inside quotes in a tag, so it can hold neither a space, a
# quote nor an angle bracket.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments."""

    def for_template(self) -> dict[str, Any]:
        """The shape chat templates expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call. `arguments` is a JSON object as text, as OpenAI's clients expect."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """The object that stands in `tool_calls` of a response."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def parse_tools(raw: Sequence[Any] | None) -> tuple[Tool, ...]:
    """The tools of a request, in OpenAI's shape or bare function objects.

    Raises:
        RequestError: naming the tool and the field.
    """
    if raw is None:
        return ()
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise RequestError("tools: must be a list of function tools.")
    tools = tuple(_parse_tool(value, f"tools[{index}]") for index, value in enumerate(raw))
    for name, times in Counter(tool.name for tool in tools).items():
        if times > 1:
            raise RequestError(f"tools: {name!r} is defined {times} times. Names must differ.")
    return tools


def _parse_tool(raw: Any, where: str) -> Tool:
    if isinstance(raw, Tool):
        return raw
    if not isinstance(raw, Mapping):
        raise RequestError(f"{where}: must be an object.")
    if raw.get("type", "function") != "function":
        raise RequestError(f"{where}.type: only 'function' tools exist here, not {raw['type']!r}.")
    function = raw.get("function", raw)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function: must be an object.")
    name = check_tool_name(function.get("name"), f"{where}.function.name")
    description = function.get("description") or ""
    if not isinstance(description, str):
        raise RequestError(f"{where}.function.description: must be a string.")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters: must be a JSON schema object.")
    return Tool(name, description, parameters)


def check_tool_name(name: Any, where: str) -> str:
    """`name` if it can stand on the wire.

    Raises:
        RequestError: it cannot.
    """
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise RequestError(
            f"{where}: must be 1 to 128 letters, digits or any of _ . : / -, found {name!r}."
        )
    if name in RESERVED_RECIPIENTS:
        raise RequestError(f"{where}: {name!r} addresses a part of the turn. Rename the tool.")
    return name


# --- what the model wrote -> arguments


def call_arguments(invocation: Invocation, tools: Iterable[Tool]) -> str:
    """The arguments of `invocation` as a JSON object, typed by the schema of its tool.

    A tool that was never declared is no error here: the caller sees the name.

    Raises:
        AtemError: a value that is not of its type, or a parameter given twice.
    """
    schema = next((tool.parameters for tool in tools if tool.name == invocation.name), {})
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    for name, raw in invocation.parameters:
        if name in arguments:
            raise AtemError(f"parameter {name!r} is given twice")
        declared = properties.get(name) if isinstance(properties, Mapping) else None
        try:
            arguments[name] = convert_value(raw, schema_types(declared, schema))
        except ValueError as error:
            raise AtemError(f"parameter {name!r} is not JSON: {error}") from None
    return dump_json(arguments)


def convert_value(raw: str, types: frozenset[str]) -> Any:
    """The value `raw` stands for, given the JSON types its schema allows (none: not known).

    Strings stay as they are, even where they look like JSON. Only `null` can mean two things, and
    means null where the schema allows it. Without a type, what reads as JSON is taken as JSON, but
    quotes stay: strings are never quoted on the wire.

    Raises:
        ValueError: the schema wants JSON and `raw` is none.
    """
    if "string" in types:
        return None if raw == "null" and "null" in types else raw
    try:
        value = load_json(raw)
    except ValueError:
        if types:
            raise
        return raw
    return raw if isinstance(value, str) and not types else value


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types `schema` allows; empty when it does not say. `root` resolves references."""
    types: set[str] = set()
    waiting, followed = [schema], set[str]()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Mapping):
            continue
        declared = node.get("type")
        if declared is not None:
            types.update(t for t in [declared, *_list(declared)] if isinstance(t, str))
            continue
        types.update(map(_type_name, _list(node.get("enum"))))
        if "const" in node:
            types.add(_type_name(node["const"]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            waiting.extend(_list(node.get(keyword)))
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_resolve(reference, root))
    return frozenset(types)


def _list(value: Any) -> list[Any]:
    # Schemas come from clients: what should be a list may be anything.
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema at a local reference; None when there is none. Nothing is fetched."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for key in reference.split("/")[1:]:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _type_name(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")


# --- tool_choice


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the next turn may call, and whether it must."""

    mode: Literal["auto", "none", "required"]
    names: tuple[str, ...] = ()
    """The tools it must choose from, when it must."""


def parse_tool_choice(raw: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice`: auto, none, required, or one tool by name (required of that one).

    Raises:
        RequestError: another value, or a tool that is not there.
    """
    declared = tuple(tool.name for tool in tools)
    if raw is None or raw == "auto":
        return ToolChoice("auto")
    if raw == "none":
        return ToolChoice("none")
    if raw == "required":
        names = declared
    elif isinstance(raw, Mapping) and raw.get("type", "function") == "function":
        function = raw.get("function", raw)
        names = (str(function.get("name") if isinstance(function, Mapping) else function),)
    else:
        raise RequestError(
            f"tool_choice: must be auto, none, required or a function by name, found {raw!r}."
        )
    if not declared:
        raise RequestError("tool_choice: a call is asked for, but the request has no tools.")
    for name in names:
        if name not in declared:
            raise RequestError(
                f"tool_choice: no tool is named {name!r}. There are: {', '.join(declared)}."
            )
    return ToolChoice("required", names)
