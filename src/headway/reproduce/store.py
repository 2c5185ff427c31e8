"""What was simulated before, by content: an interrupted reproduction goes on where it was."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from headway import __version__
from headway.planning.capacity.rehearsal import code
from headway.reproduce.tasks import Measurement, Task
from headway.workload.atomic_file import write_text


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

    Of the code in `reproduce`, only the module of the task's function counts, with what it imports from there: a
    system that keeps claims and captions in another module may change them without simulating again.
    """
    name = f"{task.function.__module__}.{task.function.__qualname__}"
    digest = hashlib.sha256(msgspec.json.encode([__version__, code(), name, type(task).__name__, task.content]))
    digest.update(_source(task.function.__module__))
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
def _source(module: str) -> bytes:
    """A digest of a module and of those of `reproduce` that it imports, directly or not."""
    digest = hashlib.sha256()
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and name not in seen:
            seen.add(name)
            text = Path(file).read_bytes()
            digest.update(text)
            waiting += sorted(each for each in _imported(text) if each.startswith(f"{__package__}."))
    return digest.digest()


def _imported(source: bytes) -> Iterator[str]:
    """Names that may be modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
