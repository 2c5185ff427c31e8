"""The records of a run, and logs of JSON lines, on disk."""

from headway.records.parquet import save
from headway.records.parts import load

__all__ = ["load", "save"]
