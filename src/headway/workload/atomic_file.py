"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headway.core.errors import HeadwayError


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path` for writing; it replaces `path` when the block ends.

    Missing folders are created. If the block raises, `path` is unchanged. Raises HeadwayError if the file cannot be
    written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise HeadwayError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise HeadwayError(f"{path}: cannot be written: {error.strerror}") from None
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, atomically."""
    with open_atomic(path) as file:
        file.write(text.encode())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
