"""The contestants of a grid: single policies by kind, and whole sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.spec import PolicySpec
from headway.config.strict_yaml import Places
from headway.config.user_modules import loader_of
from headway.core.errors import HeadwayError
from headway.policies import ORDERINGS, ROUTERS, SCALERS, resolve
from headway.policies.resolve import LoadModule, PolicyChoice


@dataclass(frozen=True)
class Contestant:
    """One or several policies under one name."""

    name: str
    policies: Mapping[str, Any]
    """Keys of a scenario's `policies`."""
    is_oracle: bool
    """Whether it uses knowledge that no real policy has. It then cannot be the best one."""
    is_named: bool
    """Whether the grid names it: it must then be possible in the first cell. Others are left out of cells that they do
    not fit."""
    observe: Mapping[str, Any] | None = None
    """How its policies observe the fleet, in place of the cell's setting."""


KINDS: Mapping[str, tuple[Mapping[str, type], Callable[[PolicySpec, LoadModule], PolicyChoice[Any]] | None]] = {
    "routing": (ROUTERS, resolve.router),
    "ordering": (ORDERINGS, resolve.ordering),
    "scaling": (SCALERS, None),  # takes a forecaster and a planner, so only a scenario can resolve it
}


def contestants(
    listed: Any, common: Mapping[str, Any], base_dir: Path, places: Places
) -> tuple[tuple[Contestant, ...], tuple[str, ...]]:
    """The contestants of a grid's `policies`, and notes on registered policies that need arguments.

    Raises HeadwayError if one is invalid, or two have the same name.
    """
    load, notes = loader_of(base_dir), list[str]()
    found: list[Contestant] = []
    for kind in KINDS:
        found += _of_kind(kind, getattr(listed, kind), load, places, notes)
    for name, section in listed.sets.items():
        found.append(_of_set(name, section, common, load, places))
    if not found:
        raise places.error(("policies",), "expected routing, ordering, scaling or sets")
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise places.error(("policies",), f"{name!r} is there twice")
    return tuple(found), tuple(notes)


def _of_kind(
    kind: str, listed: str | Sequence[PolicySpec], load: LoadModule, places: Places, notes: list[str]
) -> Iterator[Contestant]:
    registered, resolved = KINDS[kind]
    prefix = "" if kind == "routing" else f"{kind} "
    for i, spec in enumerate(registered if listed == "all" else listed):
        name, is_oracle = label(spec), False
        if resolved is not None:
            try:
                with places.at("policies", kind, *(() if listed == "all" else (i,))):
                    choice = resolved(spec, load)
            except HeadwayError as error:
                if listed != "all":
                    raise
                notes.append(f"left out: {error}")
                continue
            name, is_oracle = str(choice), choice.oracle
        yield Contestant(f"{prefix}{name}", {kind: spec}, is_oracle, listed != "all")


def label(spec: PolicySpec) -> str:
    if isinstance(spec, str):
        return spec
    given = ", ".join(f"{name}={value}" for name, value in spec.items() if name != "name")
    return f"{spec.get('name')}({given})" if given else str(spec.get("name"))


def _of_set(
    name: str, section: Mapping[str, Any], common: Mapping[str, Any], load: LoadModule, places: Places
) -> Contestant:
    policies = {key: value for key, value in section.items() if key not in ("observe", "oracle")}
    oracle = section.get("oracle")
    if oracle is not None and type(oracle) is not bool:
        raise places.error(("policies", "sets", name, "oracle"), f"expected true or false, got {oracle!r}")
    all_keys = {**common.get("policies", {}), **policies}
    is_oracle = bool(oracle)
    for kind in ("routing", "ordering"):
        spec = all_keys.get(kind)
        if spec is not None:
            with places.at("policies", "sets", name, kind):
                is_oracle |= (resolve.router if kind == "routing" else resolve.ordering)(spec, load).oracle
    return Contestant(name, policies, is_oracle, True, section.get("observe"))
