"""`python -m headway.records FOLDER` turns the parts of a killed gateway into the records of an ended run."""

from __future__ import annotations

import sys
from pathlib import Path

from headway.core.errors import HeadwayError
from headway.core.record import Records
from headway.records import parts
from headway.records.folder import FolderLock
from headway.workload.readers import run_parts


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m headway.records FOLDER\n")
        return 2
    folder = Path(arguments[0])
    try:
        records = _finish(folder)
    except (HeadwayError, OSError) as error:
        sys.stderr.write(f"headway: {error}\n")
        return 1
    if records is None:
        sys.stderr.write(f"headway: {folder / run_parts.FOLDER}: no parts of records\n")
        return 1
    sys.stdout.write(f"wrote {len(records.workload['arrival_s']):,} requests to {folder}\n")
    return 0


def _finish(folder: Path) -> Records | None:
    """Finish a folder. Raises HeadwayError while a gateway writes to it, because its later parts would become a
    separate run."""
    if not run_parts.numbers(folder):
        return None
    lock = FolderLock(folder)
    try:
        return parts.finish(folder)
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
