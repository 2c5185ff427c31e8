"""The fleet file of the gateway that stands in front of exported pools."""

from __future__ import annotations

from typing import Any

import yaml

from headway.config.scenario import Scenario
from headway.core.fleet import Pool
from headway.gateway.upstream.dialects import api_of
from headway.serving.export import vllm

_KEPT = ("name", "seed", "policies", "cascade", "pacer", "slo", "network", "gpu_limits", "gateway", "roles")
"""What a scenario says that is for serving, too."""
_PARTS = ("prefill", "decode", "aggregated")
"""Of a combo, in order."""
_NOT_THERE = ("endpoints", "processes", "kubernetes", "coefficients")
"""Of a pool: where it was before, and files."""


def text(scenario: Scenario, kind: str, namespace: str, asks: bool) -> str:
    """Pods that have names are endpoints, one by one, as policies choose among replicas; `asks`: the cluster is asked.

    HeadwayError where the gateway would keep something on a disk that it has not.
    """
    batches = scenario.spec.gateway.batches
    if batches is not None and "://" not in batches.store:
        what = f"{batches.store!r} is a file, and the gateway's pod has no disk; expected postgresql://host/database"
        raise scenario.places.error(("gateway", "batches", "store"), what)
    document = {key: scenario.document[key] for key in _KEPT if key in scenario.document}
    pools = []
    for said, pool in zip(scenario.document.get("fleet", ()), scenario.fleet.pools, strict=True):
        pools.append({**_there(said, pool), **_where(pool, pool.replicas, kind, namespace, asks)})
    combos = []
    for said, combo in zip(scenario.document.get("combos", ()), scenario.fleet.combos, strict=True):
        parts = zip([key for key in _PARTS if said.get(key)], combo.parts, strict=True)
        sides = {
            key: {**_there(said[key], part), **_where(part, part.replicas * combo.replicas, kind, namespace, asks)}
            for key, part in parts
        }
        combos.append({**said, **sides})
    fleet = {key: found for key, found in (("fleet", pools), ("combos", combos)) if found}
    return yaml.safe_dump({**document, **fleet}, sort_keys=False, allow_unicode=True, width=100)


def _there(said: dict[str, Any], pool: Pool) -> dict[str, Any]:
    """What a file says of a pool, but for where it is."""
    kept = {key: value for key, value in said.items() if key not in _NOT_THERE}
    return {**kept, "name": pool.name, "replicas": pool.replicas, "api": api_of(pool.engine.name)}


def _where(pool: Pool, num: int, kind: str, namespace: str, asks: bool) -> dict[str, Any]:
    """Its workload, or the names of its pods."""
    if asks:
        return {"kubernetes": {"name": pool.name, "kind": kind, "namespace": namespace, "port": vllm.PORT}}
    host = f"{pool.name}.{namespace}.svc"
    return {"endpoints": [f"http://{pool.name}-{i}.{host}:{vllm.PORT}" for i in range(num)]}
