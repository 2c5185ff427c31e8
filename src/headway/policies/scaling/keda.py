"""Scaling on requests, like KEDA with Kubernetes' horizontal pod autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal

from headway.core.errors import HeadwayError
from headway.core.view import PoolsView, PoolView
from headway.policies.arguments import require_above, require_at_least
from headway.policies.endpoints import within_bounds

POLLING_S = 30.0
COOLDOWN_S = 300.0


class KedaScaler:
    """Each pool gets `ceil(requests / threshold)` replicas or combos, as for a metric of type `AverageValue`.

    `requests` counts the requests in flight and in front of the pool (`metric: in_flight`), or only the waiting
    requests in engines and in front of the pool (`metric: waiting`, the Prometheus trigger of vLLM's production stack,
    which wants the minimum while no request waits). The metric is read every `polling_s`. Nothing changes while the
    number is within `tolerance` of the current one, and a pool shrinks to the highest number needed within
    `stabilization_s`: both rules come from the autoscaler that KEDA creates. KEDA's own cool-down, also 300 s, only
    delays the step from one replica to none, which Headway does not take. Defaults are those of KEDA's ScaledObject
    (pollingInterval) and of Kubernetes (keda.sh/docs, Scaling Deployments; kubernetes.io, Horizontal Pod Autoscaling).
    """

    live_settings = frozenset(("threshold", "metric", "tolerance", "stabilization_s", "polling_s"))

    def __init__(
        self,
        threshold: float = 5.0,
        metric: Literal["in_flight", "waiting"] = "in_flight",
        tolerance: float = 0.1,
        stabilization_s: float = COOLDOWN_S,
        polling_s: float = POLLING_S,
    ) -> None:
        require_above(0, threshold=threshold, polling_s=polling_s)
        require_at_least(0, tolerance=tolerance, stabilization_s=stabilization_s)
        if metric not in ("in_flight", "waiting"):
            raise HeadwayError(f"metric: expected in_flight or waiting, got {metric!r}")
        self.interval_s = polling_s
        self._threshold, self._metric = threshold, metric
        self._tolerance, self._stabilization_s = tolerance, stabilization_s
        self._recent: dict[str, list[tuple[float, int]]] = {}
        """(time, needed replicas) by pool."""

    def go_on(self, before: KedaScaler) -> None:
        self._recent = before._recent

    def scale(self, view: PoolsView) -> Mapping[str, int]:
        serving: dict[str, int] = {}
        for pool in view.pools:
            serving[pool.model] = serving.get(pool.model, 0) + pool.num_serving
        wanted = {}
        for pool in view.pools:
            number = pool.num_serving + pool.num_starting
            needed = self._needed(pool, number, pool.num_queued * pool.num_serving / max(serving[pool.model], 1))
            lately = [one for one in self._recent.get(pool.name, ()) if one[0] > view.now - self._stabilization_s]
            self._recent[pool.name] = lately = [*lately, (view.now, needed)]
            if needed < number:
                needed = min(max(most for _, most in lately), number)
            needed = within_bounds(pool, needed)
            if needed != number:
                wanted[pool.name] = needed
        return wanted

    def _needed(self, pool: PoolView, number: int, queued: float) -> int:
        staying = [replica for replica in pool.replicas if not replica.is_draining]
        if self._metric == "waiting":
            requests = queued + sum(replica.num_waiting for replica in staying)
        else:
            requests = queued + sum(replica.num_in_flight for replica in staying)
        ratio = requests / (number * self._threshold) if number else 0.0
        return number if abs(ratio - 1.0) <= self._tolerance else ceil(requests / self._threshold)
