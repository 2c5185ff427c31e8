"""What setup.py compiles can be compiled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from headway.sim import kernel

ROOT = Path(__file__).parents[1]
_TAKEN_AS_NONE = re.compile(
    r'(\w+) = [^;\n]*->_?\w+;\n(?:.*\n){0,6}? *if \(unlikely\(\1 != Py_None\)\) {\n *CPy_TypeError\("None", \1\);'
    r'(?:.*\n){1,6}? *CPy_AddTraceback\("(?P<file>[^"]+)", "\w+", (?P<line>\d+)'
)
_TAKEN_AS_A_VALUE = re.compile(
    r" *(?P<value>\w+) = \w+;\n *else {\n"
    r' *CPy_TypeErrorTraceback\("(?P<file>[^"]+)", "\w+", (?P<line>\d+), .*\n.*\n *}\n'
    r" *(?P<none>\w+) = \(PyObject \*\)&_Py_NoneStruct;\n *\w+ = (?P=value) [!=]= (?P=none);"
)


def _compiled() -> list[str]:
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMPILED":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py names no modules")


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse((ROOT / "src" / "headway" / f"{name}.py").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", _compiled())
def test_no_compiled_module_has_a_struct(name: str) -> None:
    """mypyc keeps the origins of annotations only, `list` of `list[int]`, and msgspec checks by these annotations."""
    tree = _tree(name)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    structs = [each.name for each in classes if any(ast.unparse(base).endswith("Struct") for base in each.bases)]
    assert not structs


@pytest.mark.parametrize("name", [each for each in _compiled() if each.startswith("policies/")])
def test_no_compiled_policy_has_an_argument_that_is_read_from_a_file_by_its_type(name: str) -> None:
    """A compiled constructor has no annotations, by which a list of a scenario becomes a tuple of classes."""
    plain = {"int", "float", "str", "bool", "None"}
    for made in (node for node in ast.walk(_tree(name)) if isinstance(node, ast.ClassDef)):
        if any(isinstance(node, ast.FunctionDef) and node.name in ("route", "rank") for node in made.body):
            for init in (node for node in made.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
                for each in (*init.args.args[1:], *init.args.kwonlyargs):
                    assert each.annotation is not None
                    kinds = re.sub(r"Literal\[.*?\]", "str", ast.unparse(each.annotation)).split(" | ")
                    assert set(kinds) <= plain, f"{each.arg}: {kinds}"


@pytest.mark.parametrize("name", _compiled())
def test_no_compiled_handler_awaits(name: str) -> None:
    """mypyc leaves the exception that is handled to whatever runs meanwhile: that of another call is chained to it."""
    tree = _tree(name)
    handlers = [each for node in ast.walk(tree) if isinstance(node, ast.Try) for each in node.handlers]
    assert not [node.lineno for each in handlers for node in _awaiting(each.body)]


def _awaiting(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor | ast.Yield | ast.YieldFrom):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _awaiting(ast.iter_child_nodes(node))


def test_compiled_code_expects_changes_behind_an_await() -> None:
    """mypy takes what was None, or was not, before an `await` to be so behind it; compiled code raises if it is not.
    The check for it is `raise_if_ended` or the like: in a method of its own."""
    if kernel.__file__.endswith(".py"):
        pytest.skip("Headway is not compiled here")
    files = sorted(Path(kernel.__file__).parents[3].glob("__native_headway___gateway___*.c"))
    assert files and not [place for file in files for place in _taken_for_granted(file.read_text())]


def _taken_for_granted(code: str) -> Iterator[str]:
    """Where C code takes an attribute for None, or for another value though the source compares it with None."""
    for pattern in (_TAKEN_AS_NONE, _TAKEN_AS_A_VALUE):
        for match in pattern.finditer(code):
            yield f"{match['file']}:{match['line']}"


def test_what_mypyc_takes_for_granted_is_found() -> None:
    as_none = """
    cpy_r_r47 = ((nn___AObject *)cpy_r_r46)->_x;
    if (unlikely(cpy_r_r47 != Py_None)) {
        CPy_TypeError("None", cpy_r_r47); cpy_r_r48 = 2;
    } else
        cpy_r_r48 = 1;
    if (unlikely(cpy_r_r48 == 2)) {
        CPy_AddTraceback("a.py", "f", 11, CPyStatic_globals);
    """
    as_a_value = """
    cpy_r_r45 = ((nn___AObject *)cpy_r_r44)->_y;
    if (likely(cpy_r_r45 != Py_None))
        cpy_r_r46 = cpy_r_r45;
    else {
        CPy_TypeErrorTraceback("a.py", "h", 23, CPyStatic_globals, "nn.A", cpy_r_r45);
        goto CPyL44;
    }
    cpy_r_r47 = (PyObject *)&_Py_NoneStruct;
    cpy_r_r48 = cpy_r_r46 == cpy_r_r47;
    """
    assert list(_taken_for_granted(as_none + as_a_value)) == ["a.py:11", "a.py:23"]
