"""A run's records and decision log on disk, and files that appear whole or not at all."""

from headway.records.parquet import load, save

__all__ = ["load", "save"]
