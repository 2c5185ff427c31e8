"""The fleet file of the gateway in front of exported pools."""

from __future__ import annotations

from typing import Any

import yaml

from headway.config.scenario import Scenario
from headway.core.fleet import Pool
from headway.gateway.upstream.dialects import api_of
from headway.serving.export import vllm

_SERVING_KEYS = ("name", "seed", "policies", "cascade", "pacer", "slo", "network", "gpu_limits", "gateway", "roles")
_DROPPED_POOL_KEYS = ("endpoints", "processes", "kubernetes", "coefficients")
"""Where the pool was before, and files that the gateway's pod does not have."""


def fleet_file(scenario: Scenario, kind: str, namespace: str, asks_cluster: bool) -> str:
    """The file's text. Pools name the endpoints of their pods or, with `asks_cluster`, their Kubernetes workloads.

    HeadwayError if the gateway needs a disk, which its pod does not have.
    """
    batches = scenario.spec.gateway.batches
    if batches is not None and "://" not in batches.store:
        what = f"{batches.store!r} is a file, and the gateway's pod has no disk; expected postgresql://host/database"
        raise scenario.places.error(("gateway", "batches", "store"), what)

    def section(entry: dict[str, Any], pool: Pool, num: int) -> dict[str, Any]:
        kept = {key: value for key, value in entry.items() if key not in _DROPPED_POOL_KEYS}
        kept |= {"name": pool.name, "replicas": pool.replicas, "api": api_of(pool.engine.name)}
        if asks_cluster:
            return kept | {"kubernetes": {"name": pool.name, "kind": kind, "namespace": namespace, "port": vllm.PORT}}
        host = f"{pool.name}.{namespace}.svc"
        return kept | {"endpoints": [f"http://{pool.name}-{i}.{host}:{vllm.PORT}" for i in range(num)]}

    document = {key: scenario.document[key] for key in _SERVING_KEYS if key in scenario.document}
    entries = zip(scenario.document.get("fleet", ()), scenario.fleet.pools, strict=True)
    if pools := [section(entry, pool, pool.replicas) for entry, pool in entries]:
        document["fleet"] = pools
    combos = []
    for i, (entry, combo) in enumerate(zip(scenario.document.get("combos", ()), scenario.fleet.combos, strict=True)):
        parts = zip(scenario.spec.combos[i].parts, combo.parts, strict=True)
        combos.append(entry | {key: section(entry[key], part, part.replicas * combo.replicas) for key, part in parts})
    if combos:
        document["combos"] = combos
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
