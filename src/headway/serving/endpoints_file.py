"""Files that list the addresses of a pool's replicas, written by the program that starts the engines.

A file is YAML or JSON: a list of addresses, or the target groups of Prometheus' file-based service discovery
(`[{targets: [10.0.0.7:8000]}]`), whose labels are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from headway.config.strict_yaml import Key, Places, compose, text_of
from headway.core.errors import HeadwayError
from headway.gateway.server.admin import is_address

_KEY, _TARGETS = "endpoints_file", "targets"


def read(path: Path) -> tuple[str, ...]:
    """The distinct addresses in the file. Raises HeadwayError if it has none, or has other content."""
    found = tuple(dict.fromkeys(_addresses(compose(text_of(path), str(path)), path)))
    if not found:
        raise HeadwayError(f"{path}: lists no address; expected at least one, http://host:port")
    return found


def _addresses(node: yaml.Node | None, path: Path) -> Iterator[str]:
    def error(at: yaml.Node, what: str) -> HeadwayError:
        return HeadwayError(f"{path}:{at.start_mark.line + 1}: {what}")

    if node is None:
        return
    if not isinstance(node, yaml.SequenceNode):
        raise error(node, "expected a list of addresses, http://host:port")
    for item in node.value:
        if isinstance(item, yaml.MappingNode):
            targets = next((value for key, value in item.value if key.value == _TARGETS), None)
            if targets is None:
                raise error(item, f"has no `{_TARGETS}`; expected an address, or a group with its `{_TARGETS}`")
            yield from _addresses(targets, path)
            continue
        text = item.value if isinstance(item, yaml.ScalarNode) else ""
        url = text if "://" in text else f"http://{text}"
        if not is_address(url):
            raise error(item, f"{text!r}; expected http://host:port")
        yield url


def filled(document: dict[str, Any], places: Places, base_dir: Path) -> dict[str, Any]:
    """The document with `endpoints` filled in for pools that name a file. Raises HeadwayError if a file cannot be
    used."""
    changed = dict(document)
    for section in ("fleet", "combos"):
        if isinstance(entries := document.get(section), list):
            changed[section] = [_filled(each, (section, i), places, base_dir) for i, each in enumerate(entries)]
    return changed


def _filled(entry: Any, at: Key, places: Places, base_dir: Path) -> Any:
    """`filled` for one pool, or for a combo and its parts."""
    if not isinstance(entry, Mapping):
        return entry
    entry = {key: _filled(each, (*at, key), places, base_dir) for key, each in entry.items()}
    if not isinstance(name := entry.get(_KEY), str) or not name:
        return entry
    if entry.get("endpoints"):
        raise places.error((*at, _KEY), "the pool has `endpoints`, too; expected one of the two")
    with places.at(*at, _KEY):
        return {**entry, "endpoints": list(read(base_dir / name))}
