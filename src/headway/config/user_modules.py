"""Imports users' modules from the folder of a scenario by location, without changing `sys.path`.

The folder becomes a subpackage of this module, named after the folder's encoded path. So any process can import the
module by this name, and instances of its classes can be pickled. Neighbouring modules, which it imports by plain names,
become modules of the same package, so modules in other folders may have the same names.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from headway.config.own_modules import folder_of, has_module, module_of, neighbour_of

__path__: list[str] = []
"""Makes this module a package."""


def loader_of(base_dir: Path) -> Callable[[str], ModuleType]:
    """A function that imports a module by name from the current directory, else `base_dir`, else `sys.path`.

    A name may begin with a folder, as in `policies/own`, relative to `base_dir`.
    """

    def load(name: str) -> ModuleType:
        invalidate_caches()
        given, slash, module = name.rpartition("/")
        folder = base_dir.absolute() / given if slash else folder_of(module, base_dir)
        if folder is None:
            return import_module(module)
        if not has_module(folder, module):
            raise ModuleNotFoundError(name=name)
        file = folder.joinpath(*module.split("."))
        imported = getattr(sys.modules.get(module), "__file__", None)
        if imported in (f"{file}.py", str(file / "__init__.py")):
            return sys.modules[module]  # shares the classes with a program that already imported it
        return import_module(f"{__name__}.{str(folder).encode().hex()}.{module}")

    return load


def own_modules(value: Any, base_dir: Path) -> Iterator[tuple[str, Path]]:
    """The modules that texts in a document name, as in `own:Router`, each with its folder. Texts that name no module
    are left out."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple):
            left += reversed(value)
        elif isinstance(value, str) and ":" in value and (module := module_of(value)):
            try:
                found = loader_of(base_dir)(module)
            except Exception:  # the scenario that needs it is refused
                continue
            if found.__file__ is not None:
                yield found.__name__, Path(found.__file__).parent


class _FolderFinder(MetaPathFinder):
    """Finds the packages of folders, and their modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        code, _, name = fullname.removeprefix(f"{__name__}.").partition(".")
        folder = bytes.fromhex(code).decode()
        if not name:
            package = ModuleSpec(fullname, None, is_package=True)
            package.submodule_search_locations = [folder]
            return package
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FolderLoader(folder, spec.loader)
        return spec


class _FolderLoader(SourceFileLoader):
    """Runs a module that may import its neighbours by plain names, at once or later."""

    def __init__(self, folder: str, loader: SourceFileLoader) -> None:
        super().__init__(loader.name, loader.path)
        self.folder = folder

    def exec_module(self, module: ModuleType) -> None:
        if self.folder not in sys.path:
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        super().exec_module(module)

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """`__import__`, except that a module found nowhere else is a neighbour of that name."""
        first = name.partition(".")[0]
        if level > 0 or not self._is_neighbour(first):
            return __import__(name, globals, locals, fromlist or (), level)
        within = neighbour_of(self.name, first)
        __import__(neighbour_of(self.name, name), globals, locals, fromlist or ())
        sys.modules.setdefault(first, sys.modules[within])  # for objects pickled under the plain name
        return sys.modules[neighbour_of(self.name, name) if fromlist else within]

    def _is_neighbour(self, name: str) -> bool:
        if (imported := sys.modules.get(name)) is not None:
            return imported.__name__.startswith(f"{__name__}.") and self._has(name)
        return find_spec(name) is None and self._has(name)

    def _has(self, name: str) -> bool:
        return PathFinder.find_spec(name, [self.folder]) is not None


sys.meta_path.insert(0, _FolderFinder())
