"""Keys of tasks in the cache of rehearsals, with which an interrupted reproduction goes on where it was."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from headway.planning.rehearsals import content_key
from headway.reproduce.tasks import Task


def key(task: Task, base_dir: Path) -> str:
    """A digest of everything that a result depends on: arguments, files that they name, and the code.

    Of the code in `reproduce`, only the module of the task's function counts, with what it imports from there: a
    system that keeps claims and captions in another module may change them without simulating again.
    """
    module = task.function.__module__
    paths = (base_dir / text for text in _texts(task.content))
    facts = [f"{module}.{task.function.__qualname__}", type(task).__name__, task.content]
    return content_key(facts, [path for path in paths if os.path.isfile(path)], [_source(module)])


def _texts(value: Any) -> Iterator[str]:
    """All strings in the arguments; each may name a file."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


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
