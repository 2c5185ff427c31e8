"""The records of a run and the decision log on disk."""

from headway.records.parquet import save
from headway.records.parts import load

__all__ = ["load", "save"]
