"""Fallbacks in a fleet file: hosted pools, and the pools that answer instead of others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from headway.config.spec import PoolSpec, Spec
from headway.config.strict_yaml import Key, Places
from headway.core.errors import unknown
from headway.core.fleet import Fleet, Pool

_HOSTED_KEYS = (
    "model", "name", "region", "replicas", "endpoints", "api", "api_key", "served_name", "hosted", "fallback",
    "usd_per_million_input_tokens", "usd_per_million_output_tokens", "usd_per_million_cached_tokens",
)  # fmt: skip
"""Pool keys that apply to an external service."""


def check_hosted(spec: PoolSpec, at: Key, places: Places) -> None:
    """Raise HeadwayError if a hosted pool has keys of self-run engines, or an invalid name."""
    for field in msgspec.structs.fields(PoolSpec):
        if field.name not in _HOSTED_KEYS and getattr(spec, field.name) != field.default:
            known = ", ".join(_HOSTED_KEYS)
            raise places.error((*at, field.name), f"is not a hosted pool's; expected, beside `hosted`: {known}")
    if not isinstance(spec.model, str):
        raise places.error((*at, "model"), "expected a name, as the pool is `hosted`")
    if spec.api not in (None, "openai"):
        raise places.error((*at, "api"), f"{spec.api}; expected openai, as the pool is `hosted`")


def check_simulated(specs: Sequence[tuple[Key, PoolSpec]], places: Places) -> None:
    """Raise HeadwayError if a hosted pool has no speed."""
    for at, spec in specs:
        for key in ("ttft_s", "tokens_per_s"):
            if spec.hosted is not None and getattr(spec.hosted, key) is None:
                what = "missing; expected it, without which a hosted pool can be served, not simulated"
                raise places.error((*at, "hosted", key), what)


def with_fallbacks(fleet: Fleet, spec: Spec, places: Places) -> Fleet:
    """The fleet, in which a pool that is a fallback of its own model gets a model name of its own.

    Raises HeadwayError if a fallback does not exist, is part of a loop, or stands by for a cascade.
    """
    named = _named(fleet, spec, places)
    if not named:
        return fleet
    model_of = {pool.name: pool.model.name for pool in fleet.pools}
    standby = {
        fallback for _, model, fallbacks in named.values() for fallback in fallbacks if model_of[fallback] == model
    }
    for name in standby:
        if (others := named.get(name)) is not None:
            raise places.error(others[0], f"{name} is a fallback of its own model; expected it in that pool's list")
    for model in {model for _, model, _ in named.values()}:
        if all(pool.name in standby for pool in fleet.pools if pool.model.name == model) and not any(
            combo.parts[0].model.name == model for combo in fleet.combos
        ):
            at = next(at for at, each, _ in named.values() if each == model)
            raise places.error(at, f"all pools of {model} are fallbacks of each other; expected one that is none")
    fleet = replace(fleet, pools=tuple(_stood_by(pool) if pool.name in standby else pool for pool in fleet.pools))
    _check_loops(fleet, named, places)
    return fleet


_Named = dict[str, tuple[Key, str, tuple[str, ...]]]


def _named(fleet: Fleet, spec: Spec, places: Places) -> _Named:
    """Maps each pool or combo with fallbacks to its key, its model, and the fallbacks. Raises HeadwayError if a
    fallback is invalid."""
    found: _Named = {}
    for i, pool in enumerate(fleet.pools):
        found[pool.name] = ("fleet", i, "fallback"), pool.model.name, pool.fallback
    for i, combo in enumerate(fleet.combos):
        found[combo.name] = ("combos", i, "fallback"), combo.parts[0].model.name, combo.fallback
        for key, part in spec.combos[i].parts.items():
            if part.fallback:
                raise places.error(("combos", i, key, "fallback"), "expected it at the combo, whose parts share it")
    found = {name: entry for name, entry in found.items() if entry[2]}
    names, first = {pool.name for pool in fleet.pools}, dict[str, tuple[Key, tuple[str, ...]]]()
    for name, (at, model, fallbacks) in found.items():
        for j, fallback in enumerate(fallbacks):
            if fallback == name:
                raise places.error((*at, j), f"{name} is the pool itself; expected another")
            if fallback not in names:
                raise unknown("pool", fallback, names - {name}, places.where((*at, j)))
            if fallback in fallbacks[:j]:
                raise places.error((*at, j), f"{fallback} is in the list twice")
        _, others = first.setdefault(model, (at, fallbacks))
        if others != fallbacks:
            listed = ", ".join(others)
            raise places.error(at, f"another pool of {model} has [{listed}]; expected the same, or none")
        if spec.cascade is not None and not _names_of(fleet, model).isdisjoint(spec.cascade.models):
            raise places.error(at, f"{model} is a stage of the cascade, whose judge scores its answers; expected none")
    return found


def _names_of(fleet: Fleet, model: str) -> set[str]:
    return {name for pool in fleet.all_pools if pool.model.name == model for name in pool.model.names}


def _stood_by(pool: Pool) -> Pool:
    name = f"{pool.model.name}@{pool.name}"
    return replace(pool, is_standby=True, model=replace(pool.model, name=name))


def _check_loops(fleet: Fleet, named: _Named, places: Places) -> None:
    """Raise HeadwayError if a model is, over any number of steps, its own fallback."""
    fallbacks = fleet.fallbacks.models

    def path_back(model: str, target: str, seen: tuple[str, ...]) -> tuple[str, ...] | None:
        for each in fallbacks.get(model, ()):
            if each == target:
                return (*seen, each)
            if each not in seen and (found := path_back(each, target, (*seen, each))) is not None:
                return found
        return None

    for at, model, _ in named.values():
        if (path := path_back(model, model, (model,))) is not None:
            raise places.error(at, f"a loop: {' -> '.join(path)}; expected an end")
