"""JSON as the standard has it, for values that models and clients write.

Python's own reader also takes NaN and Infinity, and gives up on deep nesting and on very long
numbers with errors of other types.
"""

import json
from typing import Any, Never


def load_json(text: str) -> Any:
    """The JSON value `text`.

    Raises:
        ValueError: not JSON; the message says where.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")


def dump_json(value: Any) -> str:
    """`value` as JSON, readable where possible and always encodable.

    Raises:
        ValueError, TypeError: it has no JSON form.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if any("\ud800" <= character <= "\udfff" for character in text):
        # Half a surrogate pair can only be written as an escape.
        return json.dumps(value, allow_nan=False)
    return text
