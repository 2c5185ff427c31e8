"""Scenarios from files and dictionaries, with GPUs, models, engines and policies as Python objects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.api.arguments import checked
from headway.config import strict_yaml
from headway.config.scenario import Scenario, check_sections, read, written
from headway.config.strict_yaml import Key, Places
from headway.core.duration import in_seconds
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model
from headway.planning.rehearsals import Source
from headway.scenario import assemble
from headway.scenario.presets import builtin as preset

ScenarioLike = Scenario | Mapping[str, Any] | str | Path
"""A scenario, the keys of one, or the path of its file."""

_SECTIONS: dict[str, tuple[type[Any], str]] = {
    "gpu": (Gpu, "gpus"),
    "model": (Model, "models"),
    "engine": (Engine, "engines"),
}
"""Keys of a pool that accept a value in place of a name, and the section that stores the value."""


@checked
def load(
    source: ScenarioLike | None = None, changes: Mapping[str, Any] | None = None, *, builtin: str | None = None
) -> Scenario:
    """A scenario from a file, from a dictionary with the same keys, or from Headway's built-in scenarios (`builtin`).

    A dictionary may hold values in place of names: `Gpu`, `Model` and `Engine` in a pool, and policies as classes or
    instances (each run copies an instance). `changes` sets values by dotted keys: `{"workload.arrivals": 30,
    "fleet.0.replicas": 8}`. HeadwayError names the invalid key and what was expected.
    """
    return assemble(*source_of(source, changes, builtin=builtin))


def source_of(
    source: ScenarioLike | None, changes: Mapping[str, Any] | None = None, *, builtin: str | None = None
) -> Source:
    """A scenario's keys and values, with `changes` made. The names in them are not looked up in the catalog."""
    if (source is None) == (builtin is None):
        raise HeadwayError("expected a scenario (a file, a dictionary), or builtin=, and not both")
    if builtin is not None:
        source = preset(builtin)
    if isinstance(source, Scenario):
        document, places, base_dir = written(source), source.places, source.base_dir
    elif not isinstance(source, Mapping | str | Path):
        raise HeadwayError(f"{source!r}; expected a scenario, its keys, or the path of its file")
    elif isinstance(source, Mapping):
        document, places, base_dir = in_seconds("", {"name": "scenario", **source}), Places(), Path()
    else:
        assert source is not None
        path = Path(source)
        document, places = read(path)
        base_dir = path.parent
    named = {_key(key): (key, value) for key, value in (changes or {}).items()}
    document, places = strict_yaml.change(document, places, named)
    check_sections(document, places)
    return Source(_with_names(document), places, base_dir)


def _key(dotted: str) -> Key:
    """The parts of a dotted key: "fleet.0.replicas" names a list's first entry."""
    return tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))


def _with_names(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with values moved to their own sections, pools that name them, and policies in the schema's
    notation."""
    named: dict[str, Any] = {**document}
    given = {section: document.get(section, ()) for _, section in _SECTIONS.values()}
    own = {section: list(each) if isinstance(each, list | tuple) else [] for section, each in given.items()}

    def pool(entry: Any) -> Any:
        if not isinstance(entry, Mapping):
            return entry
        changed = dict(entry)
        for key, (kind, section) in _SECTIONS.items():
            value = changed.get(key)
            if isinstance(value, kind):
                changed[key] = value.name
                fields = msgspec.to_builtins(value)
                if fields not in own[section]:
                    own[section].append(fields)
        return changed

    for key in ("fleet", "combos", *own):
        if not isinstance(document.get(key, ()), list | tuple):
            return named  # the schema then rejects it
    named["fleet"] = [pool(entry) for entry in document.get("fleet", ())]
    combos = document.get("combos", ())
    named["combos"] = [
        {key: pool(value) for key, value in entry.items()} if isinstance(entry, Mapping) else entry for entry in combos
    ]
    for key, values in {"fleet": named["fleet"], "combos": named["combos"], **own}.items():
        if key in document or values:
            named[key] = values
        else:
            named.pop(key, None)
    for key in ("policies", "cascade"):
        if isinstance(named.get(key), Mapping):
            named[key] = {name: _policy(value) for name, value in named[key].items()}
    if isinstance(named.get("variants"), list | tuple):
        named["variants"] = [
            {name: _policy(value) for name, value in each.items()} if isinstance(each, Mapping) else each
            for each in named["variants"]
        ]
    return named


def _policy(value: Any) -> Any:
    """The specification that names a class or an instance; other values stay unchanged."""
    if isinstance(value, list | tuple):
        return [_policy(each) for each in value]
    if value is None or isinstance(value, str | int | float | Mapping | msgspec.Struct):
        return value
    return {"name": value}
