"""Pools that are only served: they name no GPU, so simulations omit them, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from headway.config.strict_yaml import SHORT, Key, Places
from headway.core.errors import LeftOutWarning


def without_proxied(document: Mapping[str, Any], places: Places) -> tuple[Mapping[str, Any], Places]:
    """A scenario's document without the served-only pools, and without a trace's requests for their models.

    A LeftOutWarning names the pools. If no pool would remain, the document is unchanged, and the missing GPU becomes an
    error later.
    """
    left_out = _proxied(document)
    if not left_out:
        return document, places
    pools, names = document["fleet"], proxied_names(document)
    kept = [i for i in range(len(pools)) if i not in left_out]
    changed: dict[str, Any] = {**document, "fleet": [_without_fallbacks(pools[i], names) for i in kept]}
    combos = document.get("combos") or []
    others = {_model(each) for each in (*changed["fleet"], *_parts(combos))}
    models = sorted({str(pools[i]["model"]) for i in left_out} - others)
    workload = document.get("workload")
    if models and isinstance(workload, Mapping) and workload.get("trace"):
        changed["workload"] = without_models(workload, models)
    where = places.where(("fleet", left_out[0])).removesuffix(f"fleet[{left_out[0]}]")
    verb = "has no gpu: it is" if len(names) == 1 else "have no gpu: they are"
    warnings.warn(
        f"{where}{', '.join(names)} {verb} left out, as only pools with one are simulated", LeftOutWarning, stacklevel=2
    )
    return changed, _moved(places, kept)


def proxied_names(document: Mapping[str, Any]) -> list[str]:
    """The names of the pools that `without_proxied` removes."""
    return [str(document["fleet"][i].get("name") or f"pool-{i}") for i in _proxied(document)]


def _proxied(document: Mapping[str, Any]) -> list[int]:
    """The indexes of served-only pools; empty if there are no other pools."""
    pools = document.get("fleet")
    if not isinstance(pools, list):
        return []
    found = [i for i, pool in enumerate(pools) if _is_proxied(pool)]
    return found if len(found) < len(pools) or document.get("combos") else []


_SERVED = ("endpoints", "endpoints_file", "kubernetes", "inference_pool")
"""Pool keys that say where the replicas are."""


def _is_proxied(pool: Any) -> bool:
    return (
        isinstance(pool, Mapping)
        and isinstance(pool.get("model"), str)
        and any(pool.get(key) for key in _SERVED)
        and not pool.get("gpu")
        and pool.get("hosted") is None
    )


def _without_fallbacks(pool: Any, names: Sequence[str]) -> Any:
    """A pool without fallbacks that were removed."""
    fallback = pool.get("fallback") if isinstance(pool, Mapping) else None
    if not isinstance(fallback, list):
        return pool
    return {**pool, "fallback": [name for name in fallback if name not in names]}


def _parts(combos: Any) -> list[Any]:
    """The parts of all combos."""
    found = [combo.get(key) for combo in combos for key in ("prefill", "decode", "aggregated")] if combos else []
    return [each for each in found if isinstance(each, Mapping)]


def _model(pool: Any) -> Any:
    return pool.get("model") if isinstance(pool, Mapping) and isinstance(pool.get("model"), str) else None


def without_models(workload: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """A trace workload without the requests for these models."""
    trace = workload["trace"]
    given = {SHORT["trace"]: trace} if isinstance(trace, str) else dict(trace)
    return {**workload, "trace": {**given, "without_models": [*given.get("without_models", ()), *models]}}


def _moved(places: Places, kept: Sequence[int]) -> Places:
    """Places with the remaining pools renumbered."""
    new = {old: i for i, old in enumerate(kept)}

    def moved(key: Key) -> Key | None:
        if len(key) < 2 or key[0] != "fleet" or not isinstance(key[1], int):
            return key
        return ("fleet", new[key[1]], *key[2:]) if key[1] in new else None

    lines = {at: line for key, line in places.lines.items() if (at := moved(key)) is not None}
    flags = {at: flag for key, flag in places.flags.items() if (at := moved(key)) is not None}
    return Places(places.file, lines, flags, places.warned)
