"""The page /metrics: what has ended, and the state of replicas, queues, keys and reloads at this moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headway.gateway.auth.keys import ApiKeys, KeyCounts
from headway.gateway.fleet.membership import LiveFleet
from headway.gateway.scheduling.driver import Driver
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.telemetry.drift import PredictionDrift
from headway.gateway.telemetry.metrics import Metric, PrometheusMetrics, Sample
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
        driver: Driver,
        keys: ApiKeys,
        reloads: Reloads,
        charges: Charges | None,
        batches: BatchService | None,
        cache_feeds: CacheFeeds | None,
        peers: Peers | None,
    ) -> None:
        """`ended` counts the requests that have ended."""
        self._ended, self._fleet, self._health, self._drift, self._driver = ended, fleet, health, drift, driver
        self._keys, self._reloads, self._charges, self._batches = keys, reloads, charges, batches
        self._cache_feeds, self._peers = cache_feeds, peers

    def lines(self) -> Iterator[str]:
        """The page in Prometheus' text format, line by line."""
        counters = [*self._key_counters(), self._reload_counter()]
        if self._cache_feeds is not None:
            counters += self._cache_feeds.metrics(self._fleet.present())
        gauges = [*self._replica_gauges(), *self._queue_gauges(), *self._service_gauges()]
        if self._peers is not None:
            gauges += self._peers.gauges()
            counters += self._peers.counters()
        return self._ended.lines(gauges, counters)

    def _replica_gauges(self) -> list[Metric]:
        in_flight: list[Sample] = []
        up: list[Sample] = []
        ejected: list[Sample] = []
        predicted: list[Sample] = []
        for replica in self._fleet.present():
            labels = {"pool": replica.pool, "model": replica.model, "replica": str(replica.id)}
            in_flight.append((labels, replica.num_in_flight))
            up.append((labels, float(self._health.is_up(replica))))
            ejected.append((labels, float(self._health.is_ejected(replica))))
            predicted += [({**labels, "latency": name}, each) for name, each in self._drift.gauges(replica.id)]
        failed: list[Sample] = [({"pool": pool}, float(num)) for pool, num in self._fleet.num_failed.items()]
        return [
            ("requests_in_flight", "Requests at a replica", in_flight),
            ("replica_up", "Whether requests are sent to a replica", up),
            ("replica_ejected", "Whether a replica passes its health checks and gets no requests", ejected),
            ("prediction_ratio", "Predicted over observed latency of a replica's last requests, median", predicted),
            ("replicas_failed", "Wanted replicas that fail to start", failed),
        ]

    def _queue_gauges(self) -> list[Metric]:
        control = self._driver.control
        held: list[Sample] = [
            ({"model": each.model}, len(each.hold_queue.requests()) + control.num_kept(each))
            for each in control.services
        ]
        known = self._ended.tenants.known
        waiting = Counter(known(live.tenant) for live in control.held_requests() if live.tenant)
        tenants: list[Sample] = [({"tenant": tenant}, float(num)) for tenant, num in waiting.items()]
        return [
            ("requests_held", "Requests held in the gateway", held),
            ("tenant_requests_held", "Requests held in the gateway, by tenant", tenants),
        ]

    def _service_gauges(self) -> list[Metric]:
        """Of the parts that a gateway may have: a key store, a fleet file, batches."""
        charges, last, batches = self._charges, self._reloads.last, self._batches
        store_up: list[Sample] = [] if charges is None else [({}, float(charges.accounts.is_up))]
        failed: list[Sample] = [] if last is None else [({}, float(last.outcome == "failed"))]
        num_open: list[Sample] = [] if batches is None else [({}, batches.num_open)]
        return [
            ("key_store_up", "Whether the last exchange with the key store succeeded", store_up),
            ("reload_failed", "Whether the fleet file could not be reloaded the last time", failed),
            ("batch_requests_open", "Batch requests that are held or at an engine", num_open),
        ]

    def _reload_counter(self) -> Metric:
        num: list[Sample] = [({"outcome": outcome}, float(num)) for outcome, num in self._reloads.num.items()]
        return "reloads_total", "Reloads of the fleet file", num

    def _key_counters(self) -> list[Metric]:
        """What was used and refused by key, under the key's id."""
        counts = list(self._keys.counts())
        used: list[tuple[str, str, Callable[[KeyCounts], int]]] = [
            ("key_requests_total", "Requests that have ended, by key", lambda counts: counts.num_requests),
            ("key_tokens_total", "Prompt and output tokens of these requests", lambda counts: counts.num_tokens),
        ]
        metrics: list[Metric] = [
            (name, help, [({"key": key}, float(value(each))) for key, each in counts if key])
            for name, help, value in used
        ]
        refused: list[Sample] = [
            ({"key": key, "reason": reason}, float(num))
            for key, each in counts for reason, num in each.refused.items()
        ]  # fmt: skip
        errors: list[Sample] = [] if self._charges is None else [({}, float(self._charges.accounts.num_errors))]
        metrics.append(("key_store_errors_total", "Exchanges with the key store that failed", errors))
        return [*metrics, ("key_refusals_total", "Requests that were answered 429, by key and reason", refused)]
