"""Users' policies in documents: the folder of their module, and a name that is valid in any folder."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import HeadwayError

PACKAGE = "headway.config.user_modules"
"""Package for modules imported by location, each under the encoded name of its folder."""
_NAME = re.compile(r"(?P<folder>.*/)?(?P<module>\w+(?:\.\w+)*):(?P<qualname>\w+)")
"""`own:Router`, optionally with the module's folder: `policies/own:Router`."""


def folder_of(module: str, base_dir: Path) -> Path | None:
    """The folder that contains a module: the current directory, else `base_dir`; None: neither."""
    return next((folder for folder in (Path.cwd(), base_dir.absolute()) if has_module(folder, module)), None)


def neighbour_of(module: str, name: str) -> str:
    """The full name under which a module imported by location finds a plain name; other modules use the plain name."""
    if not module.startswith(f"{PACKAGE}."):
        return name
    code = module.removeprefix(f"{PACKAGE}.").partition(".")[0]
    return f"{PACKAGE}.{code}.{name}"


def has_module(folder: Path, module: str) -> bool:
    file = folder.joinpath(*module.split("."))
    return file.with_name(f"{file.name}.py").is_file() or (file / "__init__.py").is_file()


def module_of(name: str) -> str:
    """The module of `module:Class`, with its folder if one is given; empty for other texts."""
    found = _NAME.fullmatch(name)
    return "" if found is None else f"{found['folder'] or ''}{found['module']}"


def with_folder(name: str, base_dir: Path) -> str:
    """`module:Class` with the module's absolute folder in front, if it is in a folder; other texts unchanged."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    if found["folder"] is not None:
        return f"{base_dir.absolute() / found['folder']}/{found['module']}:{found['qualname']}"
    folder = folder_of(found["module"], base_dir)
    return name if folder is None else f"{folder}/{name}"


def named(value: Any) -> Any:
    """The document form of a Python class, instance or value.

    Raises HeadwayError for a class that other processes cannot import, and for an instance with unknown arguments.
    """
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, type):
        return _of_class(value)
    made_by, arguments = type(value), dict[str, Any]()
    for parameter in inspect.signature(made_by).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        given = getattr(value, parameter.name, parameter.empty)
        if given is parameter.empty or not (given is None or isinstance(given, str | int | float | bool)):
            what = f"policy {made_by.__name__}: {parameter.name!r} is no plain attribute of the instance"
            raise HeadwayError(f"{what}; expected {{'name': {made_by.__name__}, ...}}, which can be written to a file")
        if given != parameter.default:
            arguments[parameter.name] = given
    return {"name": _of_class(made_by), **arguments}


def _of_class(made_by: type[Any]) -> str:
    module = made_by.__module__
    if module == "__main__" or "<locals>" in made_by.__qualname__:
        what = f"policy {made_by.__name__}: is defined in {'a function' if module != '__main__' else '__main__'}"
        raise HeadwayError(f"{what}, so no other process can import it; expected a class of a module")
    if module.startswith(f"{PACKAGE}."):
        code, _, module = module.removeprefix(f"{PACKAGE}.").partition(".")
        return f"{bytes.fromhex(code).decode()}/{module}:{made_by.__qualname__}"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module.partition(".")[0] == "headway" or "site-packages" in Path(file).parts:
        return f"{module}:{made_by.__qualname__}"
    path = Path(file)
    parents = module.count(".") + (path.name == "__init__.py")
    return f"{path.parents[parents].absolute()}/{module}:{made_by.__qualname__}"


def plain(value: Any, name: Callable[[Any], Any] = named) -> Any:
    """A document that can be written to a file. Unchanged parts stay the same objects, so that a shared section is
    written once."""
    if isinstance(value, Mapping):
        made: Any = {key: plain(each, name) for key, each in value.items()}
        is_same = isinstance(value, dict) and all(made[key] is each for key, each in value.items())
        return _inline(value if is_same else made)
    if isinstance(value, list | tuple):
        made = [plain(each, name) for each in value]
        return value if all(new is old for new, old in zip(made, value, strict=True)) else made
    return value if value is None or isinstance(value, str | int | float | date) else name(value)


def _inline(entry: Any) -> Any:
    """A policy whose `name` is an instance, with its arguments moved beside the name."""
    name = entry.get("name")
    return {**entry, **name} if isinstance(name, Mapping) else entry
