"""Errors that the user can correct. Reported as one sentence, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_NAME_CHARS = 64


class HeadwayError(Exception):
    """An error in the user's input. The message has the place, the expected value and the nearest valid name."""


def unknown(kind: str, name: str, options: Iterable[str], where: str = "") -> HeadwayError:
    """An error for a name that is not among `options`, with the nearest one. A long name is shortened first."""
    name = name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}..."
    names = sorted(options)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(names)}"
    prefix = f"{where}: " if where else ""
    return HeadwayError(f"{prefix}unknown {kind} {name!r}; {hint}")
