"""What was simulated before, by content: an interrupted reproduction goes on where it was."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from headway import __version__
from headway.reproduce.tasks import Measurement, Task
from headway.wholefile import write_text

OTHER = ("cli", "report", "reproduce")
"""Of Headway's code, what no simulation depends on."""


class Entry(msgspec.Struct, frozen=True):
    """One file."""

    key: str
    found: Measurement


@dataclass
class Store:
    """A folder with a file for every task."""

    folder: Path
    fresh: bool = False
    """Find nothing: do everything once more."""
    notes: list[str] = field(default_factory=list)
    """Files that were not what they should be."""

    def find(self, key: str) -> Measurement | None:
        """What is known of a task. A file that cannot be read counts for nothing, and is noted."""
        file = self._file(key)
        if self.fresh or not file.exists():
            return None
        try:
            entry = msgspec.json.decode(file.read_bytes(), type=Entry)
        except (OSError, msgspec.DecodeError):
            entry = None
        if entry is None or entry.key != key:
            self.notes.append(f"{file}: not a result that Headway wrote; ignored, and simulated anew")
            return None
        return entry.found

    def keep(self, key: str, found: Measurement) -> None:
        """HeadwayError where the folder cannot be written."""
        write_text(self._file(key), msgspec.json.encode(Entry(key, found)).decode())

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def key(task: Task, base_dir: Path) -> str:
    """Of everything that a result depends on: arguments, files they name, and the code.

    Of the code in `reproduce`, only the module of the task's function counts: captions and claims may change.
    """
    source = inspect.getsourcefile(task.function)
    code = Path(source).read_bytes() if source else b""
    name = f"{task.function.__module__}.{task.function.__qualname__}"
    digest = hashlib.sha256(msgspec.json.encode([__version__, _code(), name, type(task).__name__, task.content]))
    digest.update(code)
    for text in _texts(task.content):
        path = os.path.join(base_dir, text)
        if os.path.isfile(path):
            digest.update(_digest(path, os.stat(path).st_mtime_ns))
    return digest.hexdigest()[:32]


def _texts(value: Any) -> Iterator[str]:
    """All texts among arguments; any may name a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


@cache
def _digest(path: str, _changed_ns: int) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@cache
def _code() -> str:
    """A digest of the source that simulates."""
    digest = hashlib.sha256()
    package = files("headway")
    for entry in sorted(package.iterdir(), key=lambda each: each.name):
        if entry.name not in OTHER:
            for text in _sources(entry):
                digest.update(text)
    return digest.hexdigest()


def _sources(entry: Traversable) -> Iterator[bytes]:
    if entry.is_dir():
        for inner in sorted(entry.iterdir(), key=lambda each: each.name):
            yield from _sources(inner)
    elif entry.name.endswith((".py", ".json", ".yaml", ".csv")):
        yield entry.read_bytes()
