"""A fleet file for the discovered pools, and the changes since a file was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from headway.config import strict_yaml
from headway.core.errors import HeadwayError
from headway.serving.discover.pools import FoundPool

HEADER = "# Found by `headway discover`. Next: `headway serve {file}`.\n"
WORKLOAD = """
# For `headway simulate {file}`. Made up: after a day of `headway serve {file} --records ran`, give {trace: ran}.
workload: {requests}
"""
REQUESTS = {"prompt_tokens": 512, "output_tokens": 128, "num_requests": 500, "arrivals": 2.0}
UNKNOWN = "# Not said by {name}: {what}. The profile of `engine` stands in.\n"
Edit = tuple[int, str]
"""A position in a text, and the text to insert there."""


def text(found: Sequence[FoundPool], file: str) -> str:
    """The whole fleet file, with its comments."""
    lines = [HEADER.replace("{file}", file), *(_unknown(each) for each in found), "fleet:\n"]
    lines += [_entry(each, "  ") for each in found]
    simulated = [each for each in found if "gpu" in each.entry]
    if simulated:
        models = dict.fromkeys((each.model for each in simulated), 1)
        requests = REQUESTS | ({"models": models} if len(models) > 1 else {})
        lines.append(WORKLOAD.replace("{file}", file).replace("{requests}", _plain(requests)))
    return "".join(lines)


def _unknown(found: FoundPool) -> str:
    return UNKNOWN.format(name=found.entry["name"], what=", ".join(found.unknown)) if found.unknown else ""


def _entry(found: FoundPool, indent: str) -> str:
    lines = []
    for i, (key, value) in enumerate(found.entry.items()):
        note = f"  # {found.notes[key]}" if key in found.notes else ""
        lines.append(f"{indent}{'- ' if i == 0 else '  '}{key}: {_plain(value)}{note}\n")
    return "".join(lines)


def _plain(value: Any) -> str:
    """A value in YAML, on one line."""
    dumped = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return dumped.removesuffix("\n").removesuffix("\n...").rstrip()


class Change(msgspec.Struct, frozen=True):
    """One difference between a fleet file and the engines."""

    pool: str
    what: str
    """One sentence that describes the change."""
    is_added: bool = False
    """Whether `updated` makes the change. Otherwise the user must change the file."""


def changes(path: Path, found: Sequence[FoundPool], silent: Sequence[str]) -> list[Change]:
    """The differences between a fleet file and the discovered pools. `silent`: addresses that gave no answer.

    Raises HeadwayError if the file is not a valid fleet file.
    """
    pools = _pools(path)
    listed = {url: name for name, pool in pools.items() for url in pool.get("endpoints") or ()}
    made = []
    for each in found:
        own = _pool_of(each, pools, listed)
        new = (url for url in each.entry["endpoints"] if url not in listed)
        made += [Change(own or each.entry["name"], f"{url} is new", True) for url in new]
        if own:
            made += _settings_changed(own, pools[own], each.entry)
    made += [Change(listed[url], f"{url} gives no answer") for url in silent if url in listed]
    seen = {url for each in found for url in each.entry["endpoints"]}
    made += [
        Change(name, f"{url} was not asked") for url, name in listed.items() if url not in seen and url not in silent
    ]
    return made


def updated(path: Path, found: Sequence[FoundPool]) -> str:
    """The file's text with additions: new endpoints of its pools, and new pools. Everything else stays."""
    pools, source = _pools(path), path.read_text(encoding="utf-8")
    listed = {url: name for name, pool in pools.items() for url in pool.get("endpoints") or ()}
    edits: list[Edit] = []
    fleet = _value(yaml.compose(source, Loader=yaml.SafeLoader), "fleet")
    for each in found:
        more = [url for url in each.entry["endpoints"] if url not in listed]
        own = _pool_of(each, pools, listed)
        if not more:
            continue
        if own is None:
            edits.append(_pool_edit(source, fleet, each))
        else:
            edits.append(_endpoints_edit(source, fleet.value[list(pools).index(own)], more))
    for at, added in sorted(edits, reverse=True):
        source = source[:at] + added + source[at:]
    strict_yaml.parse(source, str(path))
    return source


def with_coefficients(path: Path, pool: str, coefficients: Path) -> str:
    """The file's text with this file of coefficients in a pool. Everything else stays.

    Raises HeadwayError if the file has no pool of this name.
    """
    pools, source = list(_pools(path)), path.read_text(encoding="utf-8")
    if pool not in pools:
        raise HeadwayError(f"{path}: has no pool {pool!r}")
    node = _value(yaml.compose(source, Loader=yaml.SafeLoader), "fleet").value[pools.index(pool)]
    beside = coefficients.absolute().parent == path.absolute().parent
    shown = _plain(coefficients.name if beside else str(coefficients.absolute()))
    old = next((value for key, value in node.value if key.value == "coefficients"), None)
    if old is not None:
        at, end, added = old.start_mark.index, old.end_mark.index, shown
    elif node.flow_style:
        at = end = node.end_mark.index - 1
        added = f", coefficients: {shown}"
    else:
        at = end = _line_end(source, node)
        added = f"{' ' * node.start_mark.column}coefficients: {shown}\n"
    source = source[:at] + added + source[end:]
    strict_yaml.parse(source, str(path))
    return source


def _pools(path: Path) -> dict[str, Mapping[str, Any]]:
    """The file's pools by name, in order."""
    document, places = strict_yaml.read(path)
    fleet = document.get("fleet")
    if not isinstance(fleet, list) or not all(isinstance(each, dict) for each in fleet):
        raise places.error(("fleet",), "expected a list of pools")
    return {str(each.get("name") or f"pool-{i}"): each for i, each in enumerate(fleet)}


def _pool_of(found: FoundPool, pools: Mapping[str, Mapping[str, Any]], listed: Mapping[str, str]) -> str | None:
    """The file's pool that lists one of these engines. If there is none: the file's pool with the same name."""
    known = (listed[url] for url in found.entry["endpoints"] if url in listed)
    return next(known, found.entry["name"] if found.entry["name"] in pools else None)


def _settings_changed(name: str, own: Mapping[str, Any], entry: Mapping[str, Any]) -> Iterator[Change]:
    for key, value in entry.items():
        if key in ("name", "endpoints", "gpu", "kv_capacity_tokens") or key not in own:
            continue
        if key == "model" and not (isinstance(own[key], str) and isinstance(value, str)):
            continue  # the path of its file differs between machines, and a name may stand for it
        if own[key] != value:
            yield Change(name, f"{key} is {_plain(own[key])} in the file; the engines say {_plain(value)}")


def _value(node: Any, key: str) -> Any:
    for name, value in node.value:
        if name.value == key:
            return value
    raise HeadwayError(f"no key {key!r}")


def _pool_edit(source: str, fleet: Any, found: FoundPool) -> Edit:
    """Adds an entry at the end of the list of pools."""
    if fleet.flow_style:
        at = fleet.end_mark.index - 1
        return at, f"{', ' if fleet.value else ''}{_plain(found.entry)}"
    indent = " " * fleet.start_mark.column
    return _line_end(source, fleet.value[-1]), _entry(found, indent)


def _endpoints_edit(source: str, pool: Any, urls: Sequence[str]) -> Edit:
    """Adds addresses at the end of a pool's list."""
    listed = _value(pool, "endpoints")
    if listed.flow_style:
        return listed.end_mark.index - 1, "".join(f", {_plain(url)}" for url in urls)
    indent = " " * listed.start_mark.column
    return _line_end(source, listed.value[-1]), "".join(f"{indent}- {_plain(url)}\n" for url in urls)


def _line_end(source: str, node: Any) -> int:
    """The start of the line after a node's last scalar."""
    while isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    end = source.find("\n", node.end_mark.index)
    return len(source) if end < 0 else end + 1
