"""The interface between scaling and what starts and stops a pool's replicas."""

from __future__ import annotations

from typing import Protocol

from headway.gateway.scheduling.replica import LiveReplica


class Actuator(Protocol):
    """Starts and stops the replicas of one pool."""

    def start_initial(self) -> None:
        """Start, or find, the replicas that exist at first."""

    def add(self) -> None:
        """Start another replica in the background. Its host is called when the replica exists, or fails to start."""

    def cancel(self, num: int) -> None:
        """Give up so many replicas that have no process or pod, or that fail to start."""

    def replica_up(self, replica: LiveReplica) -> None:
        """The replica was found healthy."""

    def stop(self, replica: LiveReplica) -> None:
        """Stop a replica that is empty. Ignored if another actuator has started it."""

    async def close(self) -> None:
        """The gateway ends: stop its processes, and leave pods as they are."""


class ActuatorHost(Protocol):
    """Scaling, as actuators report to it. Pools are given by name."""

    @property
    def leads(self) -> bool:
        """Whether this gateway, of those that share the fleet, sets the number of replicas."""

    def replica_created(self, pool: str, url: str) -> LiveReplica:
        """A replica exists, or soon will."""

    def replica_lost(self, replica: LiveReplica, at_once: bool = True) -> bool:
        """A replica has ended by itself, or, unless `at_once`, will end: it gets no new requests and keeps its own.
        Returns whether to start another one in its place."""

    def start_failed(self, pool: str, why: str) -> None:
        """A replica fails to start. Attempts go on."""

    def start_recovered(self, pool: str, num_given_up: int = 0) -> None:
        """A failed replica is up, or was given up; `num_given_up` is 1 if the actuator gave it up by itself."""

    def wants_failed(self, pool: str) -> bool:
        """A failed replica is still wanted."""

    def has_room(self, pool: str) -> bool:
        """The GPUs for one more replica are available."""

    def pods_requested(self, pool: str, num: int, num_not_up: int) -> None:
        """So many pods were requested of a cluster in all, and so many of those that it has or will have are not up."""

    def set_unready(self, replica: LiveReplica, on: bool) -> None:
        """A replica is not ready: it gets no new requests while others are, and keeps its own. Or it is again."""

    def retire(self, replica: LiveReplica) -> None:
        """Drain a replica, then have it stopped."""
