"""The interface between scaling and an actuator, which starts and stops a pool's replicas."""

from __future__ import annotations

from typing import Protocol

from headway.gateway.scheduling.replica import LiveReplica


class Actuator(Protocol):
    """Starts and stops the replicas of one pool."""

    def start_initial(self) -> None:
        """Start or find the initial replicas."""

    def add(self) -> None:
        """Start another replica in the background. The host is told when the replica exists or fails to start."""

    def cancel(self, num: int) -> None:
        """Give up `num` replicas that have no process or pod, or that fail to start."""

    def replica_up(self, replica: LiveReplica) -> None:
        """The replica was found healthy."""

    def stop(self, replica: LiveReplica) -> None:
        """Stop a replica that is empty. Ignored if another actuator has started it."""

    async def close(self) -> None:
        """The gateway ends: stop its processes. Pods stay as they are."""


class ActuatorHost(Protocol):
    """The scaling side, to which actuators report. Pools are given by name."""

    @property
    def leads(self) -> bool:
        """Whether this gateway sets the number of replicas, among the gateways that share the fleet."""

    def replica_created(self, pool: str, url: str) -> LiveReplica:
        """A replica exists, or will exist soon."""

    def replica_lost(self, replica: LiveReplica, at_once: bool = True) -> bool:
        """A replica has ended by itself (`at_once`), or will end soon: then it gets no new requests and keeps its
        current requests. Returns whether to start a replacement."""

    def start_failed(self, pool: str, why: str) -> None:
        """A replica fails to start. The attempts go on."""

    def start_recovered(self, pool: str, num_given_up: int = 0) -> None:
        """A failed replica is up, or was given up; `num_given_up` is 1 if the actuator gave it up by itself."""

    def wants_failed(self, pool: str) -> bool:
        """Whether a failed replica is still wanted."""

    def has_room(self, pool: str) -> bool:
        """Whether the GPUs for one more replica are available."""

    def pods_requested(self, pool: str, num: int, num_not_up: int) -> None:
        """Report two numbers: the pods requested from a cluster, and the existing or coming pods that are not up."""

    def set_unready(self, replica: LiveReplica, on: bool) -> None:
        """A replica is not ready, or (not `on`) is ready again. An unready replica keeps its requests, and gets new
        requests only if no replica is ready."""

    def retire(self, replica: LiveReplica) -> None:
        """Drain a replica, then stop it."""
