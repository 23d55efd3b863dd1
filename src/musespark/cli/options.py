"""Command-line flags made from the config dataclasses, so that each setting is written once.

A field becomes a flag of the same name; its docstring is the help, its default the default.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Callable, Collection
from functools import cache
from typing import Annotated, Any

import typer

Command = Callable[..., None]


def with_fields(
    config: type, *, without: Collection[str] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Decorate a command that takes `**settings`: one flag for each field of `config`.

    Args:
        config: a dataclass.
        without: fields that make no sense for this command.
        defaults: other defaults for some fields than the dataclass has.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters += [
            _parameter(config, field, defaults.get(field.name, field.default))
            for field in _flag_fields(config)
            if field.name not in without
        ]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters, *_rest(signature)]
        )
        return command

    return decorate


def finish(command: Command) -> Command:
    """Hide the `**settings` that took the flags; the last decorator to apply, so the outermost."""
    signature = inspect.signature(command)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
    )
    return command


def pick(config: type, settings: dict[str, Any]) -> dict[str, Any]:
    """The entries of `settings` that are fields of `config`."""
    names = {field.name for field in _flag_fields(config)}
    return {name: value for name, value in settings.items() if name in names}


def _flag_fields(config: type) -> list[dataclasses.Field[Any]]:
    """The fields that a command line can say; a field's metadata rules out what only code can."""
    return [field for field in dataclasses.fields(config) if field.metadata.get("flag", True)]


def _rest(signature: inspect.Signature) -> list[inspect.Parameter]:
    kind = inspect.Parameter.VAR_KEYWORD
    return [parameter for parameter in signature.parameters.values() if parameter.kind is kind]


def _parameter(config: type, field: Any, default: Any) -> inspect.Parameter:
    hint = typing.get_type_hints(config)[field.name]
    name = field.name.replace("_", "-")
    # What is on by default, or left to the program, can only be switched off by a second spelling.
    has_two = (hint is bool and default) or hint == (bool | None)
    flag = f"--{name}/--no-{name}" if has_two else f"--{name}"
    option = typer.Option(flag, help=_field_docs(config).get(field.name, ""))
    if typing.get_origin(hint) is tuple:  # given several times on the command line
        hint, default = list[typing.get_args(hint)[0]], list(default)  # type: ignore[misc]
    elif typing.get_origin(hint) is typing.Literal:
        hint = str  # the dataclass refuses other words, in its own
    elif isinstance(hint, types.UnionType) and type(None) not in typing.get_args(hint):
        raise TypeError(f"{config.__name__}.{field.name}: no flag for the type {hint}")
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[hint, option],
    )


@cache
def _field_docs(config: type) -> dict[str, str]:
    """The docstrings that stand under a dataclass's fields, inherited ones included."""
    docs = {}
    for base in config.__bases__:
        if dataclasses.is_dataclass(base):
            docs.update(_field_docs(base))
    tree = ast.parse(textwrap.dedent(inspect.getsource(config)))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    for field, following in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(following.value.value).split())
    return docs
