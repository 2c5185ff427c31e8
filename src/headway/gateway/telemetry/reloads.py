"""Results of the gateway's reloads of its fleet file."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from msgspec import Struct

ReloadOutcome = Literal["applied", "unchanged", "failed"]


class Reload(Struct, frozen=True):
    """One reload of the fleet file."""

    time_s: float
    """Time in seconds since 1970."""
    cause: str
    """Cause of the reload: `signal`, `file` or `request`."""
    outcome: ReloadOutcome
    """`failed`: the file is invalid, or changes a setting that needs a restart; nothing has changed."""
    changes: tuple[str, ...] = ()
    error: str = ""


class Reloads:
    """All reloads since the gateway's start."""

    def __init__(self) -> None:
        self.last: Reload | None = None
        self.num: Counter[ReloadOutcome] = Counter()

    def add(self, reload: Reload) -> None:
        self.last = reload
        self.num[reload.outcome] += 1
