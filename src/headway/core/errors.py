"""Errors that are the user's to mend: one clear sentence, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadwayError(Exception):
    """A mistake in what the user gave. `str(error)` says where, what was expected, and the nearest valid name."""


def unknown(kind: str, name: str, options: Iterable[str], where: str = "") -> HeadwayError:
    """An error for a name that is not among `options`, suggesting the nearest one."""
    names = sorted(options)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"one of: {', '.join(names)}"
    prefix = f"{where}: " if where else ""
    return HeadwayError(f"{prefix}unknown {kind} {name!r}; {hint}")
