"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from headway.core.errors import HeadwayError


@contextmanager
def whole(path: Path, what: str) -> Iterator[IO[bytes]]:
    """A file beside `path` that takes its place when the block ends well.

    Raises `HeadwayError`, naming `what` was to be written, where that cannot be.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise HeadwayError(f"{path}: {what} cannot be written ({error.strerror or error})") from None
