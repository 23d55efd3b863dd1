"""The syntax of tool calls on the wire ("ATEM").

    <atem:function_calls>
    <atem:invoke name="weather.get">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls>

It looks like XML and is not: nothing is escaped, and a value is every character between its tags.
So a value may itself spell tags, closing ones included, and where it ends depends on what follows.
This file finds the reading under which the whole body is well formed. It knows nothing about
types: values are raw text here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from musespark.chat.strict_json import dump_json


class AtemError(ValueError):
    """A tool body that is not well formed; the message says why."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call as written: the function's name and its raw parameters in order."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    text: str
    """As it stands in the body."""


class _Kind(Enum):
    OPEN_BLOCK = auto()
    CLOSE_BLOCK = auto()
    OPEN_CALL = auto()
    CLOSE_CALL = auto()
    OPEN_VALUE = auto()
    CLOSE_VALUE = auto()


_TAG = re.compile(
    r"<atem:function_calls>|</atem:function_calls>"
    r'|<atem:invoke name="(?P<call>[^"\n]+)">|</atem:invoke>'
    r'|<atem:parameter name="(?P<value>[^"\n]+)">|</atem:parameter>'
)
_KIND_OF = {
    "<atem:function_calls>": _Kind.OPEN_BLOCK,
    "</atem:function_calls>": _Kind.CLOSE_BLOCK,
    "</atem:invoke>": _Kind.CLOSE_CALL,
    "</atem:parameter>": _Kind.CLOSE_VALUE,
}
# What may come next, only whitespace between, when a tag is structure and not part of a value.
_NEXT = {
    _Kind.OPEN_BLOCK: (_Kind.OPEN_CALL,),
    _Kind.OPEN_CALL: (_Kind.OPEN_VALUE, _Kind.CLOSE_CALL),
    _Kind.CLOSE_VALUE: (_Kind.OPEN_VALUE, _Kind.CLOSE_CALL),
    _Kind.CLOSE_CALL: (_Kind.OPEN_CALL, _Kind.CLOSE_BLOCK),
    _Kind.CLOSE_BLOCK: (_Kind.OPEN_BLOCK,),
}


@dataclass(frozen=True, slots=True)
class _Tag:
    kind: _Kind
    name: str
    start: int
    end: int


def parse_body(body: str) -> tuple[Invocation, ...]:
    """The calls in `body`, all of which must be well formed.

    A call counts only when the whole body closes: until then, any closing tag may turn out to be
    part of a value.

    Raises:
        AtemError: anything but whitespace and complete blocks of calls.
    """
    tags = [_tag(match) for match in _TAG.finditer(body)]
    if not tags or tags[0].kind is not _Kind.OPEN_BLOCK or body[: tags[0].start].strip():
        raise AtemError("it does not begin with <atem:function_calls>")
    closer_of, readable = _choose_closers(body, tags)
    if not readable:
        raise AtemError(_why_unreadable(body, tags))
    return tuple(_walk(body, tags, closer_of))


def _tag(match: re.Match[str]) -> _Tag:
    name = match["call"] or match["value"] or ""
    kind = _KIND_OF.get(match.group())
    if kind is None:
        kind = _Kind.OPEN_CALL if match["call"] else _Kind.OPEN_VALUE
    return _Tag(kind, name, match.start(), match.end())


def _choose_closers(body: str, tags: list[_Tag]) -> tuple[dict[int, int], bool]:
    """Which tag closes each value, and whether the body can then be read to its end.

    Goes from right to left, so that for each tag it is known whether everything after it is well
    formed. A value ends at the first closing tag that allows that and inside which opening and
    closing value tags pair up (a quoted call); failing that, at the first that allows it at all
    (a lone quoted tag). One pass, however many tags a model writes.
    """
    levels = [0]  # of values opened and not closed, before each tag
    for tag in tags:
        change = {_Kind.OPEN_VALUE: 1, _Kind.CLOSE_VALUE: -1}.get(tag.kind, 0)
        levels.append(levels[-1] + change)
    readable = [False] * len(tags)
    closer_of: dict[int, int] = {}
    nearest: int | None = None
    nearest_at_level: dict[int, int] = {}
    for i in range(len(tags) - 1, -1, -1):
        if tags[i].kind is _Kind.OPEN_VALUE:
            closer = nearest_at_level.get(levels[i + 1], nearest)
            readable[i] = closer is not None
            if closer is not None:
                closer_of[i] = closer
        else:
            readable[i] = _continues(body, tags, i, readable)
        if tags[i].kind is _Kind.CLOSE_VALUE and readable[i]:
            nearest = nearest_at_level[levels[i]] = i
    return closer_of, readable[0]


def _continues(body: str, tags: list[_Tag], i: int, readable: list[bool]) -> bool:
    """Whether the body is well formed from tag `i` on, read as structure."""
    is_last = i + 1 == len(tags)
    gap = body[tags[i].end :] if is_last else body[tags[i].end : tags[i + 1].start]
    if gap.strip():
        return False
    if is_last:
        return tags[i].kind is _Kind.CLOSE_BLOCK
    return tags[i + 1].kind in _NEXT[tags[i].kind] and readable[i + 1]


def _walk(body: str, tags: list[_Tag], closer_of: Mapping[int, int]) -> Iterable[Invocation]:
    opening, parameters = tags[0], list[tuple[str, str]]()
    i = 0
    while i < len(tags):
        tag = tags[i]
        if tag.kind is _Kind.OPEN_CALL:
            opening, parameters = tag, []
        elif tag.kind is _Kind.OPEN_VALUE:
            i = closer_of[i]
            parameters.append((tag.name, body[tag.end : tags[i].start]))
        elif tag.kind is _Kind.CLOSE_CALL:
            yield Invocation(opening.name, tuple(parameters), body[opening.start : tag.end])
        i += 1


def _why_unreadable(body: str, tags: list[_Tag]) -> str:
    if tags[-1].kind is not _Kind.CLOSE_BLOCK:
        return "it does not end with </atem:function_calls>"
    if body[tags[-1].end :].strip():
        return "there is text after </atem:function_calls>"
    return "its tags do not pair up"


def render_body(name: str, arguments: Mapping[str, Any]) -> str:
    """One call as the model would write it: strings bare, everything else as JSON."""
    lines = [call_prefix(name)]
    lines += [
        f'<atem:parameter name="{key}">'
        f"{value if isinstance(value, str) else dump_json(value)}</atem:parameter>"
        for key, value in arguments.items()
    ]
    return "\n".join([*lines, "</atem:invoke>", "</atem:function_calls>"])


def call_prefix(name: str) -> str:
    """How a call of `name` begins, up to its first parameter."""
    return f'<atem:function_calls>\n<atem:invoke name="{name}">'


def render_result(name: str, output: str) -> str:
    """What a tool returned, as the body of its `tool` message."""
    return f'<tool_output name="{name}">\n{output}\n</tool_output>'
