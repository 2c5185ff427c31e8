"""Cache keys of the arena's measurements. Of the policies' code, only the modules that a run uses count.

A changed router is therefore measured again, and nothing else is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from headway import policies
from headway.config.policy_preset import PARTS
from headway.config.user_modules import loader_of
from headway.planning.rehearsals import NOT_SIMULATING, content_key
from headway.planning.source_digests import module_file, source_digest
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS
from headway_papers.reproduce.tasks import Call, Task

_FOLDER = Path(policies.__file__).parent
_KINDS = ("admission", "cascade", "migration", "ordering", "routing", "scaling")
_WITHOUT = (*(f"policies/{kind}" for kind in _KINDS), "policies/__init__.py")
_OWN = Path(__file__).parent


def key_of(task: Task, base_dir: Path) -> str:
    """A digest of a scenario, its files, the code that simulates, and the modules of its policies."""
    assert isinstance(task, Call)
    arguments = task.arguments
    document, folder = arguments["document"], Path(arguments["base_dir"])
    modules = {*_always(), *_modules(_with_parts(document.get("policies", {})), folder)}
    digests = [source_digest(name, _home(name)) for name in sorted(modules)]
    files = [Path(text) for text in _texts(document) if os.path.isabs(text) and os.path.isfile(text)]
    facts = {name: value for name, value in arguments.items() if name != "base_dir"}
    function = task.function.__module__
    return content_key(
        [function, task.function.__qualname__, facts], files, [*digests, source_digest(function, _OWN)], _WITHOUT
    )


def _with_parts(policies: Mapping[str, Any]) -> Mapping[str, Any]:
    return policies if policies.get("preset") is None else {**to_builtins(PARTS), **policies}


def _modules(value: Any, base_dir: Path) -> Iterator[str]:
    """The modules of the policies that a specification names."""
    for text in _texts(value):
        if re.fullmatch(r"(?:[^:]*/)?[\w.]+:\w+", text):
            module, _, name = text.partition(":")
            yield str(getattr(loader_of(base_dir)(module), name).__module__)
        for registered in (ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS):
            if text in registered:
                yield registered[text].__module__


def _home(module: str) -> Path:
    """The folder whose modules count when this module imports them."""
    file = module_file(module)
    assert file is not None
    return _FOLDER if file.is_relative_to(_FOLDER) else file.parent


@cache
def _always() -> frozenset[str]:
    """The policy modules that the simulator itself imports."""
    package, found = _FOLDER.parent, set[str]()
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[0] not in (*NOT_SIMULATING, "policies"):
            found |= {text.decode() for text in re.findall(rb"headway\.policies\.\w+\.\w+", path.read_bytes())}
    return frozenset(name for name in found if module_file(name) is not None)


def _texts(value: Any) -> Iterator[str]:
    """All strings in a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
