"""Changes of pods in a cluster, and their effect on requests.

A pod gets no new requests if it is not ready, is being deleted, or is no longer listed in the pool. Its streams go on
while its engine answers, because their connections still work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable

from headway.gateway.fleet.actuator import ActuatorHost
from headway.gateway.scheduling.replica import LiveReplica
from headway.gateway.upstream.errors import EngineError, ExhaustedError, RefusedError

log = logging.getLogger("headway.gateway")
_PERIOD_S, _TIMEOUT_S = 1.0, 2.0
_MOST_FAILURES = 3
"""The engine of a pod that has left counts as gone after this many failed health checks in a row."""
LEAST_READY = 0.5
"""Minimum share of ready pods among the pods that were ever ready. With a lower share, the load or the probe is the
likely cause rather than the pods, and moving all load to the ready pods would overload them."""


class Readiness:
    """The replicas of a pool that are not ready, by the probes of their pods."""

    def __init__(self, pool: str, host: ActuatorHost) -> None:
        self._pool, self._host = pool, host
        self._were_ready: set[int] = set()
        """Ids of replicas whose pods have ever been ready."""
        self._is_ignored = False

    def follow(self, ready: Collection[LiveReplica], others: Iterable[LiveReplica]) -> None:
        """Place no requests at replicas whose pods are not ready.

        If fewer than half of the pods that were ever ready are ready, all pods that were ever ready are used.
        """
        others = list(others)
        self._were_ready = {each.id for each in ready} | (self._were_ready & {each.id for each in others})
        unready = [each for each in others if each.id in self._were_ready]
        is_ignored = len(ready) < LEAST_READY * (len(ready) + len(unready))
        if is_ignored != self._is_ignored:
            self._is_ignored = is_ignored
            if is_ignored:
                log.warning(
                    "%s: %d of its %d pods are not ready at the same time: all are used, as far as they answer",
                    self._pool,
                    len(unready),
                    len(ready) + len(unready),
                )
        for replica in ready:
            self._set(replica, False)
        for replica in others:
            self._set(replica, not (is_ignored and replica.id in self._were_ready))

    def _set(self, replica: LiveReplica, on: bool) -> None:
        if replica.is_unready != on and not replica.is_removed:
            log.info("%s: its pod is %s", replica.name, "not ready: it gets no new requests" if on else "ready")
            self._host.set_unready(replica, on)


class Departures:
    """Replicas whose pods have left the pool, until their requests or their engines end."""

    def __init__(self, host: ActuatorHost) -> None:
        self._host = host
        self._watching: set[asyncio.Task[None]] = set()

    def watch(self, replica: LiveReplica) -> None:
        """Watch a replica's engine. When the engine stops answering, abort the replica's requests, so that they
        continue elsewhere."""
        task = asyncio.get_running_loop().create_task(self._watch(replica))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _watch(self, replica: LiveReplica) -> None:
        num_failures = 0
        while not replica.is_removed and replica.num_in_flight:
            if await answers(replica):
                num_failures = 0
            else:
                num_failures += 1
            if num_failures == _MOST_FAILURES:
                log.warning("%s is gone; its requests go on elsewhere", replica.name)
                self._host.replica_lost(replica)
                return
            await asyncio.sleep(_PERIOD_S)

    def close(self) -> None:
        for task in self._watching:
            task.cancel()


async def answers(replica: LiveReplica) -> bool:
    """Whether a replica's engine answers its health check with any status. True if this process cannot check it."""
    try:
        await replica.check_health(_TIMEOUT_S)
    except (RefusedError, ExhaustedError):
        return True
    except EngineError:
        return False
    return True
