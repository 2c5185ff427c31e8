"""API keys in tests: their digests, and the headers that carry them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

ADMIN = {"Authorization": "Bearer root"}
"""The header with the admin key `root`."""


def digest(key: str) -> str:
    """The digest of a key, as fleet files have it."""
    return sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Place(NamedTuple):
    """A new store."""

    location: str
    away: Callable[[], AbstractContextManager[None]]
    """While the block runs, the store cannot be used. It is there again afterwards, with all that it had."""


@contextmanager
def hidden(file: str) -> Iterator[None]:
    """The file is away meanwhile."""
    os.rename(file, f"{file}.away")
    Path(file).mkdir()
    yield
    Path(file).rmdir()
    os.rename(f"{file}.away", file)
