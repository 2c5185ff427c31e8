"""The records of a run and the decision log on disk."""

from headway.records.parquet import load, save

__all__ = ["load", "save"]
