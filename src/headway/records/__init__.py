"""The records of a run, and JSON-lines logs, on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.records.parquet import save
    from headway.records.parts import load

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Import on access, because both modules import pyarrow, which JSON-lines logs do not need."""
    if name == "load":
        from headway.records.parts import load

        return load
    if name == "save":
        from headway.records.parquet import save

        return save
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
