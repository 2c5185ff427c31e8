"""What every reader is told."""

from __future__ import annotations

from msgspec import Struct


class Options(Struct, frozen=True):
    """How to read a trace."""

    limit: int | None = None
    """Read no more than this many rows of the file."""
    sort: bool = False
    """Sort by arrival; False: rows out of order are an error."""
    skip_bad: bool = False
    """Leave bad lines out and count them; False: the first one is an error."""
