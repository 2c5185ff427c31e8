"""Our own Parquet, as `Workload.to_parquet` and a run's records write it."""

from __future__ import annotations

from pathlib import Path

from headway.workload import files
from headway.workload.readers.options import Options
from headway.workload.table import Workload

MAGIC = "PAR1"


def matches(line: str) -> bool:
    """By the file's first bytes."""
    return line.startswith(MAGIC)


def read(path: Path, options: Options) -> Workload:
    """The table, checked. There are no lines to skip: a bad row is an error."""
    workload = files.from_parquet(path)
    if options.sort:
        workload = workload.sorted()
    if options.limit is not None:
        workload = workload.head(options.limit)
    return workload.validate(str(path))
