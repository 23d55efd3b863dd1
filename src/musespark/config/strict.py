"""Reading fields out of a JSON object without ever guessing.

A misspelt key that falls back to a default runs a different model, quietly. So a reader here
hands out each field once, checks its type, and at the end refuses whatever was never asked for,
naming the known field closest to it.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from musespark.errors import ConfigError

_MISSING = object()

# What a person calls each JSON type.
_TYPE_NAMES: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigError: no such file, not JSON, or not an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(value).__name__}.")
    return value


class FieldReader:
    """Takes the fields of one JSON object, one by one, with their types checked."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        """`where` is the file (and the object inside it) that every error names."""
        self.where = where
        self._fields = dict(fields)
        self._known: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def error(self, name: str, problem: str) -> ConfigError:
        """An error about the field `name` that says where it stands."""
        return ConfigError(f"{self.where}: {name}: {problem}")

    def missing(self, name: str) -> ConfigError:
        """An error that says the field `name` is missing, or which field is a typo of it."""
        similar = difflib.get_close_matches(name, set(self._fields) - self._known, n=1)
        return self.error(
            name, f"is missing{f'; is {similar[0]!r} a typo of it?' if similar else '.'}"
        )

    def take(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of field `name`, which must be of JSON type `kind`.

        A field that is absent or null takes the default; without a default that is an error.
        """
        self._known.add(name)
        value = self._fields.get(name)
        if value is None:
            if default is _MISSING:
                raise self.missing(name)
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"must be {_TYPE_NAMES[kind]}, found {value!r}.")
        return value

    def take_positive(self, name: str, kind: type = int, default: Any = _MISSING) -> Any:
        """Like `take`, for a number that must be greater than zero."""
        value = self.take(name, kind, default)
        if value is not None and not value > 0:
            raise self.error(name, f"must be greater than 0, found {value!r}.")
        return value

    def take_choice(self, name: str, choices: tuple[str, ...], default: Any = _MISSING) -> Any:
        """Like `take`, for a string that must be one of `choices`."""
        value = self.take(name, str, default)
        if value is not None and value not in choices:
            raise self.error(
                name,
                f"must be one of {', '.join(map(repr, choices))}; found {value!r}"
                f"{_nearest(value, choices)}.",
            )
        return value

    def take_layer_list(
        self, name: str, num_layers: int, kind: type, choices: Iterable[Any] = ()
    ) -> list[Any]:
        """A list of one `kind` per layer; `choices`, if given, are all it may hold."""
        values: list[Any] = self.take(name, list)
        if len(values) != num_layers:
            raise self.error(
                name, f"has {len(values)} entries, but num_hidden_layers is {num_layers}."
            )
        allowed = tuple(choices)
        for index, value in enumerate(values):
            right_type = isinstance(value, (int, float) if kind is float else kind)
            if not right_type or isinstance(value, bool):
                raise self.error(
                    f"{name}[{index}]", f"must be {_TYPE_NAMES[kind]}, found {value!r}."
                )
            if allowed and value not in allowed:
                raise self.error(
                    f"{name}[{index}]",
                    f"must be one of {', '.join(map(repr, allowed))}; found {value!r}"
                    f"{_nearest(value, allowed)}.",
                )
        return values

    def ignore(self, *names: str) -> None:
        """Fields that are known to change nothing here."""
        self._known.update(names)

    def finish(self) -> None:
        """Refuse every field nobody asked for."""
        unknown = sorted(set(self._fields) - self._known)
        if unknown:
            lines = ", ".join(f"{name!r}{_nearest(name, self._known)}" for name in unknown)
            raise ConfigError(
                f"{self.where}: unknown field{'s' if len(unknown) > 1 else ''}: {lines}. "
                "A field this version does not know could change what the model computes."
            )


def _nearest(name: Any, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {similar[0]!r}?)" if similar else ""
