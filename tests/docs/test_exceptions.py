"""No exception instance is raised twice. Each raise adds a traceback to it, which keeps the frames and their values."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import headway
import headway_papers

PACKAGES = (headway, headway_papers)
SOURCES = sorted(path for package in PACKAGES for path in Path(package.__path__[0]).rglob("*.py"))


def _lasting(values: dict[str, Any], depth: int = 2) -> Iterator[str]:
    """Names of exception instances among a module's or a class's attributes, and in their containers."""
    for name, value in values.items():
        found = [value, *value.values()] if isinstance(value, Mapping) else [value]
        found += value if isinstance(value, list | tuple | set | frozenset) else []
        if any(isinstance(each, BaseException) for each in found):
            yield name
        if isinstance(value, type) and depth and value.__module__.startswith("headway"):
            yield from (f"{name}.{inner}" for inner in _lasting(dict(vars(value)), depth - 1))


def _modules() -> Iterator[Any]:
    for info in chain(*(pkgutil.walk_packages(each.__path__, f"{each.__name__}.") for each in PACKAGES)):
        if not info.name.endswith("__main__"):
            try:
                yield importlib.import_module(info.name)
            except ModuleNotFoundError as error:  # an extra that is not installed
                assert not (error.name or "").startswith("headway"), error


def test_no_module_and_no_class_keeps_an_exception_instance() -> None:
    kept = {f"{module.__name__}.{name}" for module in _modules() for name in _lasting(vars(module))}
    assert not kept


def _shared(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Lines that raise a value which outlives the call: an attribute, an element, or a parameter."""
    arguments = function.args
    parameters = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for node in ast.walk(function):
        if not isinstance(node, ast.Raise):
            continue
        choices = [node.exc.body, node.exc.orelse] if isinstance(node.exc, ast.IfExp) else [node.exc]
        for raised in choices:
            is_parameter = isinstance(raised, ast.Name) and raised.id in parameters
            if is_parameter or isinstance(raised, ast.Attribute | ast.Subscript):
                yield node.lineno


def raised_again(text: str) -> list[int]:
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sorted({line for function in functions for line in _shared(function)})


@pytest.mark.ci
def test_what_is_raised_is_made_where_it_is_raised() -> None:
    found = {str(path): lines for path in SOURCES if (lines := raised_again(path.read_text(encoding="utf-8")))}
    assert not found


def test_the_rule_finds_what_it_forbids() -> None:
    text = """
def f(self, error):
    if self.failed:
        raise self.error
    raise errors[0] if error else ValueError("a")
async def g(error):
    raise error
def h():
    try:
        g()
    except ValueError as error:
        raise error from None
    raise KeyError
"""
    assert raised_again(text) == [4, 5, 7]

    class Kept:
        NEVER = ValueError("kept")
        TABLE = MappingProxyType({"a": KeyError("a")})

    Kept.__module__ = "headway.made_up"
    assert set(_lasting({"kept": Kept, "GONE": OSError(), "fine": ValueError})) == {"kept.NEVER", "kept.TABLE", "GONE"}
