"""The page /metrics: ended requests, and the current state of replicas, queues, keys and reloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from time import time
from typing import TYPE_CHECKING

from headway.gateway.auth.keys import ApiKeys
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.scheduling.shadows import Shadows
from headway.gateway.telemetry.autopilot import AutopilotControls
from headway.gateway.telemetry.autopilot import metrics as autopilot_metrics
from headway.gateway.telemetry.drift import PredictionDrift
from headway.gateway.telemetry.loop_delay import LoopDelay
from headway.gateway.telemetry.metrics import Metric, PrometheusMetrics, Sample
from headway.gateway.telemetry.process import build_info, process_metrics
from headway.gateway.telemetry.reloads import Reloads
from headway.gateway.upstream.health import HealthMonitor

if TYPE_CHECKING:
    from headway.gateway.batch.service import BatchService
    from headway.gateway.charges import Charges
    from headway.gateway.kv_events.feeds import CacheFeeds
    from headway.gateway.peers.peers import Peers


class MetricsPage:
    """Reads the gateway's parts for each page."""

    def __init__(
        self,
        ended: PrometheusMetrics,
        fleet: LiveFleet,
        health: HealthMonitor[LiveReplica],
        drift: PredictionDrift,
        loop_delay: LoopDelay,
        driver: Driver,
        keys: ApiKeys,
        reloads: Reloads,
        charges: Charges | None,
        batches: BatchService | None,
        cache_feeds: CacheFeeds | None,
        peers: Peers | None,
        shadows: Shadows | None,
        autopilot: Callable[[], AutopilotControls | None],
    ) -> None:
        """`ended` counts the requests that have ended."""
        self._ended, self._fleet, self._health, self._drift, self._driver = ended, fleet, health, drift, driver
        self._loop_delay, self._keys, self._reloads, self._charges, self._batches = (
            loop_delay,
            keys,
            reloads,
            charges,
            batches,
        )
        self._cache_feeds, self._peers, self._build_info = cache_feeds, peers, build_info()
        self._shadows, self._autopilot = shadows, autopilot

    def lines(self, is_open: bool = False) -> Iterator[str]:
        """The page line by line in Prometheus' text format. `is_open`: in OpenMetrics, with exemplars."""
        metrics = [
            *self._replica_metrics(),
            self._usd(),
            *self._queue_gauges(),
            *self._service_metrics(),
            *self._key_counters(),
        ]
        if self._cache_feeds is not None:
            metrics += self._cache_feeds.metrics(self._fleet.present())
        if self._peers is not None:
            metrics += self._peers.metrics()
        if self._shadows is not None:
            metrics += self._shadows.metrics()
        if (autopilot := self._autopilot()) is not None:
            metrics += autopilot_metrics(autopilot)
        delay: Metric = "headway_loop_delay_seconds", [({}, self._loop_delay.recent_s())]
        metrics += [self._build_info, delay, *process_metrics()]
        return self._ended.lines(metrics, time() - self._driver.now if is_open else None)

    def _replica_metrics(self) -> list[Metric]:
        in_flight, up, ejected, predicted = list[Sample](), list[Sample](), list[Sample](), list[Sample]()
        factors = list[Sample]()
        running, waiting, kv_share = list[Sample](), list[Sample](), list[Sample]()
        for replica in self._fleet.present():
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id), "name": replica.name}
            in_flight.append((labels, replica.num_in_flight))
            up.append((labels, float(self._health.is_up(replica))))
            ejected.append((labels, float(self._health.is_ejected(replica))))
            load = replica.load
            for samples, value in ((running, load.running), (waiting, load.waiting), (kv_share, load.kv_share)):
                if value is not None:
                    samples.append((labels, float(value)))
            predicted += [({**labels, "latency": name}, each) for name, each in self._drift.gauges(replica.id)]
            factors += [({**labels, "term": term}, each) for term, each in self._drift.factor_gauges(replica.id)]
        failed: list[Sample] = [({"pool": pool}, float(num)) for pool, num in self._fleet.num_failed.items()]
        return [
            ("headway_requests_in_flight", in_flight),
            ("headway_replica_up", up),
            ("headway_replica_ejected", ejected),
            ("headway_replica_requests_running", running),
            ("headway_replica_requests_waiting", waiting),
            ("headway_replica_kv_share", kv_share),
            ("headway_prediction_ratio", predicted),
            ("headway_step_time_factor", factors),
            ("headway_replicas_failed", failed),
        ]

    def _usd(self) -> Metric:
        usd = self._fleet.usd(self._ended.hosted_tokens)
        return "headway_usd_total", [({"pool": pool, "model": model}, each) for (pool, model), each in usd.items()]

    def _queue_gauges(self) -> list[Metric]:
        control = self._driver.control
        held: list[Sample] = [
            ({"model": each.model}, len(each.hold_queue.requests()) + control.num_kept(each))
            for each in control.services
        ]
        known = self._ended.tenants.known
        waiting = Counter(known(live.tenant) for live in control.parts.held_requests() if live.tenant)
        tenants: list[Sample] = [({"tenant": tenant}, float(num)) for tenant, num in waiting.items()]
        return [("headway_requests_held", held), ("headway_tenant_requests_held", tenants)]

    def _service_metrics(self) -> list[Metric]:
        """Metrics of optional parts: a key store, a fleet file, batches."""
        charges, last, batches = self._charges, self._reloads.last, self._batches
        store_up: list[Sample] = [] if charges is None else [({}, float(charges.accounts.is_up))]
        errors: list[Sample] = [] if charges is None else [({}, float(charges.accounts.num_errors))]
        num: list[Sample] = [({"outcome": outcome}, float(num)) for outcome, num in self._reloads.num.items()]
        failed: list[Sample] = [] if last is None else [({}, float(last.outcome == "failed"))]
        num_open: list[Sample] = [] if batches is None else [({}, batches.num_open)]
        return [
            ("headway_key_store_up", store_up),
            ("headway_key_store_errors_total", errors),
            ("headway_reloads_total", num),
            ("headway_reload_failed", failed),
            ("headway_batch_requests_open", num_open),
        ]

    def _key_counters(self) -> list[Metric]:
        """Use and refusals by key, under the key's id."""
        counts = list(self._keys.counts())
        refused: list[Sample] = [
            ({"key": key, "reason": reason}, float(num)) for key, each in counts for reason, num in each.refused.items()
        ]
        return [
            ("headway_key_requests_total", [({"key": key}, float(each.num_requests)) for key, each in counts if key]),
            ("headway_key_tokens_total", [({"key": key}, float(each.num_tokens)) for key, each in counts if key]),
            ("headway_key_refusals_total", refused),
        ]
