"""Sets values in the text of a YAML file, and preserves its comments and layout."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from headway.config import strict_yaml
from headway.config.strict_yaml import SHORT, Key
from headway.core.errors import HeadwayError

_END_OF_LINE = re.compile(r"[^\n]*")


def edited(text: str, changes: Mapping[Key, Any], file: str = "") -> str:
    """The text of a document with values set, as by `strict_yaml.change`.

    Only changed parts are rewritten. If that is impossible, as with an anchor on a changed value, the whole document is
    written without its comments.
    """
    document, places = strict_yaml.parse(text, file)
    flags = {key: (strict_yaml.spell(key), value) for key, value in changes.items()}
    wanted, _ = strict_yaml.change(document, places, flags)
    try:
        made = text
        for key, value in changes.items():
            made = _with(made, key, value, file)
        if strict_yaml.parse(made, file)[0] == wanted:
            return made
    except HeadwayError:
        pass  # the edit produced an invalid document
    return strict_yaml.dump(wanted)


def unified_diff(before: str, after: str, name: str) -> str:
    """A diff for `patch` and `git apply`; empty if the texts are equal."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, name)
    return "".join(each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines)


def _with(text: str, key: Key, value: Any, file: str) -> str:
    """The text with one value set."""
    node = strict_yaml.compose(text, file)
    for i, step in enumerate(key):
        child = _child(node, step)
        is_last = i == len(key) - 1
        if child is None:
            assert isinstance(node, yaml.MappingNode)
            return _with_entry(text, node, step, _nested(key[i + 1 :], value))
        if not is_last and isinstance(child, yaml.ScalarNode):
            short = {SHORT[str(step)]: child.value} if child.value and step in SHORT else {}
            return _replaced(text, child, {**short, **_nested(key[i + 1 :], value)})
        node = child
    assert node is not None
    return _replaced(text, node, value)


def _nested(keys: Key, value: Any) -> Any:
    for step in reversed(keys):
        value = {step: value}
    return value


def _child(node: yaml.Node | None, step: str | int) -> yaml.Node | None:
    """The value under a key, or an entry of a list; None: the mapping lacks the key."""
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        found: yaml.Node = node.value[step]
        return found
    if not isinstance(node, yaml.MappingNode):
        raise HeadwayError(f"{step}: expected keys and values there")
    return next((value for name, value in node.value if name.value == step), None)


def _replaced(text: str, node: yaml.Node, value: Any) -> str:
    start, end = _start(node), _end(node)
    gap = " " if start and text[start - 1] == ":" else ""  # the value is empty
    return text[:start] + gap + _flow(value) + text[end:]


def _with_entry(text: str, node: yaml.MappingNode, step: str | int, value: Any) -> str:
    entry = f"{step}: {_flow(value)}"
    if node.flow_style:
        at = _end(node) - 1
        while text[at - 1] in " \n":
            at -= 1
        return f"{text[:at]}{', ' if node.value else ''}{entry}{text[at:]}"
    end_of_line = _END_OF_LINE.match(text, _end(node))
    assert end_of_line is not None
    at = end_of_line.end()
    return f"{text[:at]}\n{' ' * _column(node)}{entry}{text[at:]}"


def _flow(value: Any) -> str:
    """A value on one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return dumped.removesuffix("\n").removesuffix("\n...")


def _start(node: yaml.Node) -> int:
    assert node.start_mark is not None
    return node.start_mark.index


def _column(node: yaml.Node) -> int:
    assert node.start_mark is not None
    return node.start_mark.column


def _end(node: yaml.Node) -> int:
    """The end of a node's last value; the node's own end mark is after the comments below it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    assert node.end_mark is not None
    return node.end_mark.index
