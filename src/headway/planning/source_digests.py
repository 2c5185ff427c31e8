"""Digests of modules and of what they import, for keys of results that depend on code."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from headway.config.own_modules import neighbour_of


@cache
def source_digest(module: str, folder: Path) -> bytes:
    """A digest of the sources of a module and of what it imports in a folder."""
    digest = hashlib.sha256()
    for file in sources(module, folder):
        digest.update(file.read_bytes())
    return digest.digest()


def sources(module: str, folder: Path) -> list[Path]:
    """The files of a module and of the modules in a folder that it imports, directly or indirectly, at its top level or
    in functions."""
    waiting, tried, found = [module], {module}, dict[str, Path]()
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        if file is not None and (name == module or file.is_relative_to(folder)):
            found[name] = source = _source_of(file)
            if source.suffix == ".py":
                names = {neighbour_of(name, each) for each in imported_names(source.read_text("utf-8", "replace"))}
                waiting += sorted(names - tried)
                tried |= names
    return list(found.values())


def module_file(name: str) -> Path | None:
    """The file of a module that was imported or belongs to an imported package; None if there is none.

    The digest is therefore the same before and after a function has imported its dependencies.
    """
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None:
        return Path(file)
    parts = name.split(".")
    packages = ((sys.modules.get(".".join(parts[:i])), parts[i:]) for i in range(len(parts) - 1, 0, -1))
    package, rest = next((each for each in packages if hasattr(each[0], "__path__")), (None, parts))
    for folder in getattr(package, "__path__", ()):
        path = Path(folder, *rest)
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
    return None


def _source_of(file: Path) -> Path:
    """The source of a module; a compiled module has it in the same folder."""
    source = file.with_name(f"{file.name.partition('.')[0]}.py")
    return source if file.suffix == ".so" and source.is_file() else file


_IMPORT = re.compile(r"(?:\bfrom\s+\.*([\w.]+)\s+)?\bimport\s+(\((?:[^)#]|#[^\n]*)*\)|[^\n;#]*)")
_COMMENT = re.compile(r"#[^\n]*")


def imported_names(source: str) -> Iterator[str]:
    """Imported names that may be modules: all of the source's syntax tree, and some of its texts. The trees of all
    of Headway take a second."""
    for module, names in _IMPORT.findall(source.replace("\\\n", " ")):
        if module:
            yield module
        for each in _COMMENT.sub("", names.strip("() \t")).split(","):
            name = each.partition(" as ")[0].strip()
            if name.replace(".", "").isidentifier():
                yield f"{module}.{name}" if module else name
