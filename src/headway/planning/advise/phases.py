"""Separate or shared prefill and decode: the fleet's own replicas in the other arrangement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.config.scenario import Scenario
from headway.config.strict_yaml import spell
from headway.core.fleet import Combo, Pool
from headway.planning.advise.changes import Candidate, Change, LeftOut

KIND = "disaggregation"
PREFILL_SHARES = (0.25, 0.5, 0.75)
"""Shares of a pool's replicas that become prefill replicas."""
_NETWORK = "network_bytes_per_s"
_OF_COMBO = ("name", "replicas", "min_replicas", "max_replicas", "scheduled_min_replicas", "fallback")
"""Keys of a pool that belong to the combo if the pool is part of one."""
_NUMBERS = ("replicas", "endpoints")
_ELSEWHERE = ("endpoints_file", "processes", "kubernetes", "inference_pool")
"""Keys that locate all replicas of a pool together, so the replicas cannot be divided between two pools."""
_FIRST_TOKENS = {"vllm": "decode", "sglang": "sent"}
"""Maps each engine to the replica whose first token the client receives (docs/disaggregation.md)."""


def phases(today: Scenario, document: Mapping[str, Any]) -> Iterator[Candidate | LeftOut]:
    """Pairs of prefill and decode replicas merged into replicas for both phases, and pools divided into pairs.

    Without pairs, no data moves between replicas, so records suffice. For pairs, the fleet file must contain the pool's
    bandwidth, because records of a fleet without pairs do not show it.
    """
    if today.spec.policies.scaling is not None:
        yield LeftOut(KIND, f"all of kind {KIND}", "the scaler sets the numbers", "headway plan combos")
        return
    for i, combo in enumerate(today.fleet.combos):
        if len(combo.parts) == 2:
            yield _together(combo, i, document["combos"][i])
    for i, pool in enumerate(today.fleet.pools):
        if pool.hosted is None:
            yield from _apart(pool, i, document)


def _together(combo: Combo, i: int, entry: Mapping[str, Any]) -> Candidate | LeftOut:
    """The replicas of a pair, each running both phases."""
    name, (prefill, decode) = f"prefill and decode together in {combo.name}", combo.parts
    sides = entry["prefill"], entry["decode"]
    if any(key in side for key in _ELSEWHERE for side in sides):
        return _unlisted(name)
    alike = [{key: value for key, value in side.items() if key not in ("name", *_NUMBERS)} for side in sides]
    if alike[0] != alike[1]:
        return LeftOut(KIND, name, "its replicas for prefill and for decode differ", "headway plan combos")
    endpoints = [url for side in sides for url in side.get("endpoints") or ()]
    num = {"endpoints": endpoints} if endpoints else {"replicas": prefill.replicas + decode.replicas}
    kept = {key: value for key, value in entry.items() if key in _OF_COMBO}
    return Candidate((KIND,), name, (Change(("combos", i), {**kept, "aggregated": {**alike[0], **num}}),))


def _unlisted(name: str) -> LeftOut:
    return LeftOut(KIND, name, "its replicas are not listed in the file", "endpoints")


def _apart(pool: Pool, i: int, document: Mapping[str, Any]) -> Iterator[Candidate | LeftOut]:
    """Some of a pool's replicas for prefill, and the rest for decode."""
    entry, name = document["fleet"][i], f"prefill and decode apart in {pool.name}"
    if pool.replicas < 2:
        yield LeftOut(KIND, name, "it has one replica", "a second one")
        return
    if _NETWORK not in entry:
        why = "the bandwidth between its replicas is not recorded, nor in the file"
        yield LeftOut(KIND, name, why, f"{spell(('fleet', i, _NETWORK))}, as it is measured")
        return
    if any(key in entry for key in _ELSEWHERE):
        yield _unlisted(name)
        return
    combos = document.get("combos") or []
    rest = [each for j, each in enumerate(document["fleet"]) if j != i]
    for num in sorted({min(max(round(share * pool.replicas), 1), pool.replicas - 1) for share in PREFILL_SHARES}):
        pair = _pair(pool, entry, num)
        changes = Change(("fleet",), rest), Change(("combos",), [*combos, pair])
        yield Candidate((KIND,), f"{name}: {num} for prefill, {pool.replicas - num} for decode", changes)


def _pair(pool: Pool, entry: Mapping[str, Any], num_prefill: int) -> dict[str, Any]:
    """A pool's entry rewritten as one combo."""
    side = {key: value for key, value in entry.items() if key not in (*_OF_COMBO, *_NUMBERS)}
    endpoints = list(entry.get("endpoints") or ())

    def some(urls: Sequence[str], num: int) -> dict[str, Any]:
        return {**side, "endpoints": list(urls)} if urls else {**side, "replicas": num}

    engine = next((each for name, each in _FIRST_TOKENS.items() if pool.engine.name.startswith(name)), None)
    return {
        "name": pool.name,
        **{key: entry[key] for key in ("fallback",) if key in entry},
        "prefill": some(endpoints[:num_prefill], num_prefill),
        "decode": some(endpoints[num_prefill:], pool.replicas - num_prefill),
        **({} if engine is None else {"handover": {"first_token": engine}}),
    }
