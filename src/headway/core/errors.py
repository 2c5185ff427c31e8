"""Errors that the user can correct. Each is shown as one sentence, without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_MAX_NAME_CHARS = 64
_MIN_LIKENESS = 0.5
"""Similarity below which no name is suggested."""
_MAX_LISTED = 60
"""With more names than this, only the most similar names are listed."""


class HeadwayError(Exception):
    """An error in the user's input. The message states the place, the expected value and the closest valid name."""


class HeadwayWarning(UserWarning):
    """A message for the user that is not an error. Shown once."""


class SloWarning(HeadwayWarning):
    """A warning about an SLO so long that its unit is probably wrong."""


class LeftOutWarning(HeadwayWarning):
    """A warning about input that a command ignores."""


def unknown(kind: str, name: str, options: Iterable[str], where: str = "") -> HeadwayError:
    """The error for a name that is not in `options`. Its message gives the closest option. A long name is shortened
    first."""
    name = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    names = sorted(options)
    near = max(names, key=lambda each: _likeness(name, each), default="")
    is_near = _likeness(name, near) >= _MIN_LIKENESS
    hint = f"did you mean {near!r}?" if is_near else f"one of: {', '.join(names)}"
    if not is_near and len(names) > _MAX_LISTED:
        likest = sorted(sorted(names, key=lambda each: -_likeness(name, each))[:8])
        hint = f"one of {len(names)}, such as {', '.join(likest)}"
    prefix = f"{where}: " if where else ""
    return HeadwayError(f"{prefix}unknown {kind} {name!r}; {hint}")


def _likeness(name: str, other: str) -> float:
    """Similarity from 0 to 1 (equal). A common prefix raises it (Winkler): `h100-80g` is closer to H100 than to
    A100."""
    share = difflib.SequenceMatcher(None, other, name).ratio()
    num_first = next((i for i in range(4) if name[i : i + 1] != other[i : i + 1] or i >= len(name)), 4)
    return share + 0.1 * num_first * (1 - share)


def unusable(policy: object, method: str, returned: object, expected: str) -> HeadwayError:
    """An error for an invalid return value of a policy's method, such as None."""
    value = repr(returned)
    value = value if len(value) <= _MAX_NAME_CHARS else f"{value[:_MAX_NAME_CHARS]}..."
    return HeadwayError(f"policy {type(policy).__name__}: `{method}` returned {value}; expected {expected}")


_TYPE_NAMES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "string",
    "array": "list",
    "object": "mapping",
    "dict": "mapping",
}


def type_name(python: str) -> str:
    """The YAML name of a Python type."""
    return _TYPE_NAMES.get(python, python)


def mismatch(message: str) -> str:
    """msgspec's message about a type mismatch, with YAML's type names."""

    def in_words(found: re.Match[str]) -> str:
        *others, last = map(type_name, found[1].split(" | "))
        return f"{', '.join(others)} or {last}" if others else last

    return message[:1].lower() + re.sub("`([^`]*)`", in_words, message[1:])
