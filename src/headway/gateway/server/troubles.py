"""Problems that an operator should look at, in words: replicas that are down, ejected, slow or full, and failing
parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.gateway.gateway import Gateway
from headway.gateway.server.schema import HeldRequests, ReplicaRow, Trouble
from headway.gateway.telemetry.drift import TOLERATED

_FULL_KV = 0.95
_LONG_DELAY_S = 0.5
_LONG_HOLD_S = 1.0
"""Length of a hold above which it is a problem. Shorter holds of requests are routine."""


def troubles(gateway: Gateway, rows: Sequence[ReplicaRow], queues: Sequence[HeldRequests]) -> list[Trouble]:
    """The current problems of the fleet, severe ones first."""
    found = [*_of_gateway(gateway), *_of_queues(rows, queues)]
    found += [
        Trouble(pool, "fails to start", False, f"{_replicas(num)} wanted here fail to start: {why}")
        for pool, num, why in gateway.fleet.failed()
    ]
    up = {row.model for row in rows if row.status == "up"}
    for row in rows:
        found += _of_replica(row, row.model in up, gateway.settings.stale_s)
    found += _slow_pools(rows)
    return sorted(found, key=lambda each: not each.is_severe)


def _of_gateway(gateway: Gateway) -> Iterator[Trouble]:
    if (late_s := gateway.telemetry.loop_delay.recent_s()) >= _LONG_DELAY_S:
        why = (
            f"ran up to {late_s:.2g} s late within the last minute: its machine or its process has too much to do, and"
            " its clients wait for that. More CPUs or --workers help"
        )
        yield Trouble("gateway", "late", False, why)
    last, charges, peers = gateway.reloads.last, gateway.charges, gateway.peers
    if last is not None and last.outcome == "failed":
        yield Trouble("fleet file", "not current", False, f"was not reloaded, and what was before holds: {last.error}")
    if charges is not None and not charges.accounts.is_up:
        yield Trouble("key store", "down", True, "keys and budgets cannot be read")
    if peers is not None and not peers.is_up:
        yield Trouble("peer store", "down", False, "gateways do not know of each other's requests; each goes on alone")


def _of_queues(rows: Sequence[ReplicaRow], queues: Sequence[HeldRequests]) -> Iterator[Trouble]:
    """One problem for each model whose requests wait in the gateway."""
    for model in dict.fromkeys(queue.model for queue in queues):
        own = [queue for queue in queues if queue.model == model]
        held, oldest_s = sum(queue.held for queue in own), max(queue.oldest_s for queue in own)
        if oldest_s < _LONG_HOLD_S:
            continue
        up = [row for row in rows if row.model == model and row.status == "up"]
        full = [row for row in up if row.in_flight >= row.most_in_flight]
        if not up:
            reason = "no replica is up"
        elif len(full) == len(up):
            most = sum(row.most_in_flight for row in up)
            reason = f"{_replicas(len(up))} up, all with as many requests as they may have ({most:,})"
        else:
            reason = (
                f"{len(up) - len(full)} of {_replicas(len(up))} have room: the ordering or the admission keeps them"
            )
        waiting = "1 request is" if held == 1 else f"{held:,} requests are"
        yield Trouble(
            model, "waits", len(full) == len(up), f"{waiting} held, the oldest for {oldest_s:.3g} s: {reason}"
        )


def _of_replica(row: ReplicaRow, has_others: bool, stale_s: float) -> Iterator[Trouble]:
    why = row.why or "no probe has succeeded yet"
    if row.status == "down":
        yield Trouble(row.name, "down", not has_others, f"gets no requests: {why}")
    elif row.status == "ejected":
        yield Trouble(row.name, "ejected", not has_others, f"gets no requests, as it serves worse than its pool: {why}")
    elif row.status == "unready":
        yield Trouble(row.name, "down", not has_others, "gets no new requests: its pod is not ready")
    if row.status != "up":
        return
    if row.kv_share >= _FULL_KV:
        yield Trouble(
            row.name, "full", False, f"its KV cache is {row.kv_share:.0%} full: requests wait or are preempted"
        )
    if row.engine.waiting and row.in_flight < row.most_in_flight:
        wait = "1 request waits" if row.engine.waiting == 1 else f"{row.engine.waiting:,} requests wait"
        yield Trouble(row.name, "full", False, f"{wait} in the engine's own queue")
    if row.age_s is not None and row.age_s > stale_s:
        what = f"its metrics were read {row.age_s:.3g} s ago: policies use the gateway's own counts"
        yield Trouble(row.name, "not current", False, what)
    if row.prefix_cache is not None and row.prefix_cache.state == "degraded":
        yield Trouble(row.name, "not current", False, f"its KV cache events are not followed: {row.prefix_cache.why}")


def _slow_pools(rows: Sequence[ReplicaRow]) -> Iterator[Trouble]:
    """Replicas that are slower than predicted. The remedy is given once for each pool."""
    corrections: dict[str, str] = {}
    for row in rows:
        if row.status != "up" or row.prediction is None:
            continue
        factors = (("between tokens", row.prediction.itl), ("to the first token", row.prediction.ttft))
        slow = [
            f"{1 / each:.3g} times as long {what}"
            for what, each in factors
            if each is not None and each * TOLERATED < 1
        ]
        if slow:
            why = f"takes {' and '.join(slow)} as its step-time model predicts: plans do not hold"
            correction = row.prediction.correction
            if correction is not None and corrections.setdefault(row.pool, row.name) == row.name:
                why += f". To correct the predictions of {row.pool}: {correction}"
            yield Trouble(row.name, "slow", False, why)
        elif terms := [each.text for each in row.prediction.drift if each.factor > 1]:
            yield Trouble(row.name, "slow", False, "; ".join(terms))


def _replicas(num: int) -> str:
    return "1 replica" if num == 1 else f"{num:,} replicas"
