"""The fleet file of the gateway that stands in front of exported pools."""

from __future__ import annotations

from typing import Any

import yaml

from headway.export import vllm
from headway.scenario import Scenario

_KEPT = ("name", "seed", "policies", "cascade", "pacer", "slo", "network", "gpu_limits", "gateway")
"""What a scenario says that is for serving, too."""
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
    for said, pool in zip(scenario.document["fleet"], scenario.fleet.pools, strict=True):
        made: dict[str, Any] = {key: value for key, value in said.items() if key not in _NOT_THERE}
        made |= {"name": pool.name, "replicas": pool.replicas, "api": "vllm"}
        if asks:
            made["kubernetes"] = {"name": pool.name, "kind": kind, "namespace": namespace, "port": vllm.PORT}
        else:
            host = f"{pool.name}.{namespace}.svc"
            made["endpoints"] = [f"http://{pool.name}-{i}.{host}:{vllm.PORT}" for i in range(pool.replicas)]
        pools.append(made)
    return yaml.safe_dump({**document, "fleet": pools}, sort_keys=False, allow_unicode=True, width=100)
