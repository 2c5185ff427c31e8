"""Converts users' YAML files strictly into Structs. Errors state the file, line, key and the closest valid name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import yaml

from headway.core.duration import EXPECTED, in_seconds, is_seconds
from headway.core.errors import HeadwayError, mismatch, type_name, unknown

T = TypeVar("T")
Key = tuple[str | int, ...]
"""The path of a value: ("fleet", 0, "gpu") is `fleet[0].gpu`."""


_MAX_TEXT_CHARS = 64
"""Maximum length of a wrong value in an error message."""
_MAX_LEVELS = 100
"""Maximum nesting of mappings and sequences."""
_MAX_REPEATED = 100_000
"""Maximum number of values that exist only through aliases."""


class Places:
    """The origins of a document's values: lines of a file, or command-line flags."""

    def __init__(
        self,
        file: str = "",
        lines: Mapping[Key, int] | None = None,
        flags: Mapping[Key, str] | None = None,
        warned: Iterable[Key] = (),
    ) -> None:
        self.file = file
        self.lines = dict(lines or {})
        self.flags = dict(flags or {})
        self.warned = set(warned)
        """Keys set by options that warn of an unlikely value themselves."""

    def where(self, key: Key) -> str:
        """The origin of a key: `chat.yaml:12: fleet[0].gpu`, or `--gpu`. A key without a line uses its closest
        parent's."""
        for end in range(len(key), 0, -1):
            if key[:end] in self.flags:
                return self.flags[key[:end]]
        lines = (self.lines[key[:end]] for end in range(len(key), -1, -1) if key[:end] in self.lines)
        line = next(lines, None)
        parts = [f"{self.file}:{line}" if line is not None else self.file, spell(key)]
        return ": ".join(part for part in parts if part)

    @contextmanager
    def at(self, *key: str | int) -> Iterator[None]:
        """Add this key to the message of a HeadwayError raised in the block."""
        try:
            yield
        except HeadwayError as error:
            raise self.error(key, str(error)) from error

    def error(self, key: Key, what: str) -> HeadwayError:
        """A HeadwayError about this key."""
        where = self.where(key)
        return HeadwayError(f"{where}: {what}" if where else what)


def spell(key: Key) -> str:
    """The path of a key as text, as in `fleet[0].gpu`."""
    return "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in key).lstrip(".")


def read(path: Path) -> tuple[dict[str, Any], Places]:
    """The mapping in a YAML file, with durations in seconds, and the origins of its values. Raises HeadwayError for
    other content."""
    return parse(text_of(path), str(path))


def text_of(path: Path) -> str:
    """A file's text. Raises HeadwayError if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise HeadwayError(f"{path}: is a folder; expected a file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as text: {error}") from None


def parse(text: str, file: str) -> tuple[dict[str, Any], Places]:
    """As `read`, for a text; `file` is its name in errors."""
    with _explaining(file):
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            places = Places(file, dict(_lines(node, (), file)) if node else {})
            data = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    if not isinstance(data, dict):
        kind = "nothing" if data is None else f"a {type_name(type(data).__name__)}"
        raise HeadwayError(f"{file}: expected keys and values, found {kind}")
    return in_seconds("", data), places


def compose(text: str, file: str) -> yaml.Node | None:
    """The tree of a YAML text, of bounded depth and size; None: the text is empty. Raises HeadwayError like `read`."""
    with _explaining(file):
        return yaml.compose(text, Loader=_Loader)


@contextmanager
def _explaining(file: str) -> Iterator[None]:
    """Turn the YAML library's exceptions into HeadwayErrors."""
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        what = "" if isinstance(error, _BoundsError) else "not valid YAML: "
        raise HeadwayError(f"{file}{line}: {what}{error.problem or error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise HeadwayError(f"{file}: not valid YAML: {error}") from None


SHORT = {"engine": "name", "trace": "path"}
"""Maps a key whose value may be a string to the key of a mapping for which the string is shorthand."""


def change(
    data: Mapping[str, Any], places: Places, changes: Mapping[Key, tuple[str, Any]]
) -> tuple[dict[str, Any], Places]:
    """A copy of a document with values set, in order: key -> (the flag that sets it, the value)."""
    changed, places = dict(data), Places(places.file, places.lines, places.flags, places.warned)
    for key, (flag, value) in changes.items():
        parent: Any = changed
        for step in key[:-1]:
            _check_step(parent, step, flag)
            child = parent.get(step, {}) if isinstance(parent, dict) else parent[step]
            if isinstance(child, str) and step in SHORT:
                child = {SHORT[step]: child}
            if not isinstance(child, dict | list):
                raise HeadwayError(f"{flag}: {places.where(key[:-1])}: expected keys and values there")
            parent[step] = child = child.copy()
            parent = child
        _check_step(parent, key[-1], flag)
        parent[key[-1]] = in_seconds(key[-1], value)
        places.flags[key] = flag
    return changed, places


def _check_step(parent: Any, step: str | int, flag: str) -> None:
    """Raise HeadwayError if a list has no such entry."""
    if isinstance(parent, list) and not (isinstance(step, int) and step < len(parent)):
        raise HeadwayError(f"{flag}: {step!r} is no entry of a list of {len(parent)}; expected 0 to {len(parent) - 1}")


class _BoundsError(yaml.MarkedYAMLError):
    """A valid document that is too large or too deep."""


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e6 as a number, as YAML 1.2 and JSON do, and bounds depth and alias expansion."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_repeated = 0
        self._extents: dict[yaml.Node, tuple[int, int]] = {}
        """Maps each complete node to (levels, values including those repeated by aliases)."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        alias = event if isinstance(event, yaml.AliasEvent) else None
        self._depth += 1
        if self._depth > _MAX_LEVELS:
            raise _BoundsError(problem=f"more than {_MAX_LEVELS} levels", problem_mark=cast(Any, event.start_mark))
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if alias is None:
            self._extents[node] = self._extent(node)
            return node
        self._check(node in self._extents, f"*{alias.anchor} refers to itself", alias)
        levels, num_values = self._extents[node]
        self._num_repeated += num_values
        self._check(self._depth + levels <= _MAX_LEVELS, f"more than {_MAX_LEVELS} levels with *{alias.anchor}", alias)
        what = f"*{alias.anchor}: aliases repeat more than {_MAX_REPEATED:,} values"
        self._check(max(self._num_repeated, num_values) <= _MAX_REPEATED, what, alias)
        return node

    def _extent(self, node: yaml.Node) -> tuple[int, int]:
        """(levels, values) of a node, computed from its children."""
        children: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        extents = [self._extents[each] for each in children]
        return 1 + max([levels for levels, _ in extents], default=0), 1 + sum([num for _, num in extents])

    @staticmethod
    def _check(is_met: bool, what: str, event: yaml.Event) -> None:
        if not is_met:
            raise _BoundsError(problem=what, problem_mark=cast(Any, event.start_mark))


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _lines(node: yaml.Node, key: Key, file: str) -> Iterator[tuple[Key, int]]:
    yield key, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise HeadwayError(f"{file}:{line}: a key must be a word")
            if name.value in seen:
                raise HeadwayError(f"{file}:{line}: {spell((*key, name.value))} is here a second time")
            seen.add(name.value)
            yield from _lines(value, (*key, name.value), file)
            yield (*key, name.value), line
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _lines(item, (*key, i), file)
    elif node.tag == "tag:yaml.org,2002:float" and node.value.lower().lstrip("+-") in (".inf", ".nan"):
        raise HeadwayError(f"{file}:{node.start_mark.line + 1}: {spell(key)}: expected a finite number")


def convert(data: Any, to: type[T], places: Places, at: Key = ()) -> T:
    """`data` strictly converted to `to`; `at` is its key in the document. Raises HeadwayError if it does not fit."""
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError as error:
        raise _explained(error, data, to, places, at) from None


def _explained(error: msgspec.ValidationError, data: Any, to: Any, places: Places, at: Key) -> HeadwayError:
    what, _, path = str(error).partition(" - at ")
    inner = _key(path)
    key = (*at, *inner)
    if "[...]" in path and (found := _in_free_key(data, to, inner)) is not None:
        return _explained(*found[1:], places, (*key, found[0]))
    if name := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        return unknown("key", name[1], _fields(data, to, inner), places.where((*key, name[1])))
    if name := re.fullmatch(r"Object missing required field `(.*)`", what):
        return places.error(key, f"{name[1]!r} is missing")
    if name := re.fullmatch(r"Invalid (?:enum )?value '(.*)'", what):
        return unknown("value", name[1], _values(data, to, inner), places.where(key))
    message = mismatch(what)
    if re.match(r"expected (integer|number)\b.*, got string$", message) and (text := _text(data, inner)) is not None:
        message += f": {text!r}"  # usually a unit; elsewhere it might be a secret
        if key and is_seconds(key[-1]):
            message += f"; {EXPECTED}"
    return places.error(key, message)


def _text(data: Any, key: Key) -> str | None:
    """The text at a key, shortened if long; None if there is none."""
    for step in key:
        if not isinstance(data, Mapping | list | tuple):
            return None
        data = data.get(step) if isinstance(data, Mapping) else data[int(step)] if isinstance(step, int) else None
    if not isinstance(data, str):
        return None
    return data if len(data) <= _MAX_TEXT_CHARS else f"{data[:_MAX_TEXT_CHARS]}..."


def _in_free_key(data: Any, to: Any, key: Key) -> tuple[str, msgspec.ValidationError, Any, Any] | None:
    """The first key chosen by the user whose value does not fit: its name, the error, the value, and its Struct."""
    structs = [
        t.value_type.cls
        for t in _types(data, to, key)
        if isinstance(t, msgspec.inspect.DictType) and isinstance(t.value_type, msgspec.inspect.StructType)
    ]
    for step in key:
        data = data[step]
    for cls in structs:
        for name, value in data.items():
            try:
                msgspec.convert(value, cls)
            except msgspec.ValidationError as error:
                return name, error, value, cls
    return None


def _key(path: str) -> Key:
    """The key of msgspec's path `$.fleet[0].gpu`, up to a key chosen by the user, which msgspec writes `[...]`."""
    key: list[str | int] = []
    for name, index, free in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]|(\[\.\.\.\])", path):
        if free:
            break
        key.append(name or int(index))
    return tuple(key)


def _types(data: Any, to: Any, key: Key) -> Iterator[msgspec.inspect.Type]:
    """The possible types of the value at `key` in a `to`."""
    types = [msgspec.inspect.type_info(to)]
    for step in key:
        types = [child for t in _members(types) for child in _children(t, step, data)]
        data = data[step]
    yield from _members(types)


def _fields(data: Any, to: Any, key: Key) -> set[str]:
    """The valid keys of a Struct at `key`."""
    structs = [t for t in _types(data, to, key) if isinstance(t, msgspec.inspect.StructType)]
    for step in key:
        data = data[step]
    tagged = [t for t in structs if t.tag_field and data.get(t.tag_field) == t.tag]
    names = {field.encode_name for t in tagged or structs for field in t.fields}
    return names | {t.tag_field for t in structs if t.tag_field}


def _values(data: Any, to: Any, key: Key) -> set[str]:
    """The valid strings at `key`."""
    words: set[str] = set()
    for t in _types(data, to, key):
        if isinstance(t, msgspec.inspect.LiteralType):
            words.update(str(value) for value in t.values)
    if key:
        structs = (t for t in _types(data, to, key[:-1]) if isinstance(t, msgspec.inspect.StructType))
        words.update(str(t.tag) for t in structs if t.tag_field == key[-1])
    return words


def _members(types: list[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    for t in types:
        yield from _members(list(t.types)) if isinstance(t, msgspec.inspect.UnionType) else (t,)


def _children(t: msgspec.inspect.Type, step: str | int, data: Any) -> Iterator[msgspec.inspect.Type]:
    if isinstance(t, msgspec.inspect.StructType) and (not t.tag_field or data.get(t.tag_field) == t.tag):
        yield from (field.type for field in t.fields if field.encode_name == step)
    elif isinstance(t, msgspec.inspect.CollectionType):
        yield t.item_type
    elif isinstance(t, msgspec.inspect.DictType):
        yield t.value_type


def plain(value: Any) -> Any:
    """A Struct as plain document values, without keys whose value is None."""
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if each is not None}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def dump(document: Mapping[str, Any]) -> str:
    """A document as YAML, with its keys in order."""
    return yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=100)
