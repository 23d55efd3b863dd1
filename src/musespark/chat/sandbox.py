"""The jinja environment of chat templates: what transformers offers them, and nothing else."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, Never

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def make_environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """An environment without a loader (so no include, no import), with immutable data.

    Whitespace and helpers are those of transformers, which templates are written for.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        dict=_make_dict,
        namespace=_SafeNamespace,
        raise_exception=_raise_exception,
        strftime_now=lambda pattern: clock().strftime(pattern),
    )
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only holds it."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """Jinja's namespace without underscore names, which lead towards Python's internals."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *mappings = args
        attributes = dict(*mappings, **values)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"{name!r} cannot be set on a namespace.")


def _make_dict(*args: Any, **values: Any) -> dict[str, Any]:
    return dict(*args, **values)


def _raise_exception(message: str) -> Never:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
