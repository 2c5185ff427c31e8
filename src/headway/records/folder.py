"""A records folder: one gateway at a time writes to the folder, and no run replaces the files of an earlier run."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pyarrow as pa
from pyarrow import parquet

from headway.core.errors import HeadwayError
from headway.workload.readers.run_parts import METADATA

LOCK = ".lock"
BEGAN_S = "began_s"
"""Provenance key of a gateway's records: the wall-clock time of their time 0."""


class FolderLock:
    """The right to write to a records folder, until `release` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        """Raises HeadwayError if another process holds the lock."""
        self._file = folder / LOCK
        self._handle: int | None = self._locked()
        while self._handle is None:  # the holder may release and delete the file in between
            self._handle = self._locked()

    def release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._file.unlink(missing_ok=True)
            os.close(handle)

    def _locked(self) -> int | None:
        handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise HeadwayError(
                f"{self._file.parent}: a gateway that runs writes its records there; expected a folder for each gateway"
            ) from None
        except OSError:  # a file system without locks
            return handle
        with suppress(FileNotFoundError):
            if os.stat(self._file).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)
        return None


def set_aside(folder: Path) -> Path | None:
    """Move the files of an ended run into a separate folder, `ended-BEGIN`; None if there are none.

    Raises OSError if they cannot be moved.
    """
    files = sorted(folder.glob("*.parquet"))
    requests = folder / "requests.parquet"
    if requests not in files:
        return None
    began = datetime.fromtimestamp(_began_s(requests), UTC)
    target = base = folder / f"ended-{began:%Y%m%dT%H%M%SZ}"
    num = 1
    while target.exists():
        num += 1
        target = base.with_name(f"{base.name}-{num}")
    target.mkdir()
    for file in files:
        if file.name in _OF_A_RUN:
            os.replace(file, target / file.name)
    return target


_OF_A_RUN = {f"{name}.parquet" for name in ("requests", "segments", "stretches", "moves", "replicas", "drafts")}


def _began_s(requests: Path) -> float:
    """Start time of the run; if unknown, the time at which its file was written."""
    with suppress(pa.ArrowException, OSError, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        run = msgspec.json.decode((parquet.read_schema(requests).metadata or {})[METADATA])
        return float(run["provenance"][BEGAN_S])
    return requests.stat().st_mtime
