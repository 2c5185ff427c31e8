"""Autoscalers of Kubernetes and KEDA for a fleet's pools, with the settings of the simulated scalers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from headway.config.scenario import Scenario
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.gateway.upstream.dialects import api_of

PROMETHEUS = "http://prometheus-server.monitoring:9090"
METRICS = {
    "vllm": ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    "sglang": ("sglang:token_usage", "sglang:num_running_reqs", "sglang:num_queue_reqs"),
}
"""Metrics by dialect: the share of the KV cache in use, running requests and waiting requests."""
Manifest = dict[str, Any]


def autoscalers(scenario: Scenario, scaling: Mapping[str, Any]) -> str:
    """A YAML document for each pool with a scaler.

    `target-utilization` on KV use becomes a HorizontalPodAutoscaler with a metric of its pods, which an adapter must
    provide. On requests it becomes a ScaledObject of KEDA that queries Prometheus.

    Raises HeadwayError for other scalers, and for engines with unknown metrics.
    """
    name = scaling["name"]
    if name not in ("target-utilization", "keda"):
        raise HeadwayError(f"scaler {name}: no autoscaler of Kubernetes does what it does")
    pools = [pool for pool in scenario.fleet.pools if pool.max_replicas is not None]
    made = [
        _horizontal(pool, scaling) if scaling.get("kv_use", 0.7) and name != "keda" else _keda(pool, scaling)
        for pool in pools
    ]
    return yaml.safe_dump_all(made, sort_keys=False, width=100)


def _metrics(pool: Pool) -> tuple[str, str, str]:
    api = api_of(pool.engine.name)
    if api not in METRICS:
        raise HeadwayError(
            f"{pool.name}: {pool.engine.name}: expected vLLM or SGLang, whose metrics autoscalers can read"
        )
    return METRICS[api]


def _horizontal(pool: Pool, scaling: Mapping[str, Any]) -> Manifest:
    target = {"type": "AverageValue", "averageValue": f"{round(1000 * scaling.get('kv_use', 0.7))}m"}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": pool.name},
        "spec": {
            "scaleTargetRef": _workload(pool),
            "minReplicas": max(pool.min_replicas, 1),
            "maxReplicas": pool.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": _metrics(pool)[0]}, "target": target}}],
            "behavior": _behavior(scaling),
        },
    }


def _keda(pool: Pool, scaling: Mapping[str, Any]) -> Manifest:
    _, running, waiting = _metrics(pool)
    # SGLang counts requests by priority and, under an empty priority, in total. An empty label also matches a missing
    # one.
    total = ',priority=""' if running.startswith("sglang:") else ""
    pods = f'{{pod=~"{pool.name}-.*"{total}}}'
    counted = [waiting] if scaling.get("metric") == "waiting" else [running, waiting]
    query = " + ".join(f"sum({metric}{pods})" for metric in counted)
    threshold = scaling.get("threshold", scaling.get("in_flight", 5.0))
    metadata = {"serverAddress": PROMETHEUS, "query": query, "threshold": f"{threshold:g}"}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": pool.name},
        "spec": {
            "scaleTargetRef": _workload(pool),
            "pollingInterval": round(scaling.get("polling_s", 30 if scaling["name"] == "keda" else 15)),
            "cooldownPeriod": 300,
            "minReplicaCount": max(pool.min_replicas, 1),
            "maxReplicaCount": pool.max_replicas,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)}},
            "triggers": [{"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}],
        },
    }


def _workload(pool: Pool) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": pool.name}


def _behavior(scaling: Mapping[str, Any]) -> Manifest:
    return {"scaleDown": {"stabilizationWindowSeconds": round(scaling.get("stabilization_s", 300.0))}}
