"""Modules of users, imported from the folder of a scenario by their location, while `sys.path` stays as it is.

The folder becomes a package inside this one, and the folder's path is spelled in the package's name. So any process can
import the module again by its name, and instances of its classes can be pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module, invalidate_caches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

from headway.config.own_modules import folder_of, has_module

__path__: list[str] = []
"""Makes this module a package."""


def loader_of(base_dir: Path) -> Callable[[str], ModuleType]:
    """Imports a module by name: from the current directory, else from `base_dir`, else from `sys.path`.

    A name may begin with the folder, as in `policies/own`, relative to `base_dir`.
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
            return sys.modules[module]  # a program that imported it shares its classes
        return import_module(f"{__name__}.{str(folder).encode().hex()}.{module}")

    return load


class _FolderFinder(MetaPathFinder):
    """Finds the packages of folders, and the modules in them."""

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
    """Runs a module that may import its neighbours by their plain names."""

    def __init__(self, folder: str, loader: SourceFileLoader) -> None:
        super().__init__(loader.name, loader.path)
        self.folder = folder

    def exec_module(self, module: ModuleType) -> None:
        if self.folder in sys.path:
            super().exec_module(module)
            return
        sys.path.append(self.folder)
        try:
            super().exec_module(module)
        finally:
            sys.path.remove(self.folder)


sys.meta_path.insert(0, _FolderFinder())
