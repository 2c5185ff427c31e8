"""Combo instances: replicas of a combo that start and stop together. A replica of a plain pool is an instance by
itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from headway.gateway.fleet.specs import ServedPool
from headway.gateway.scheduling.replica import LiveReplica


class ComboInstance:
    """One instance of a combo, or (in a pool) one replica."""

    def __init__(self, number: int, served: ServedPool) -> None:
        self.number, self.name = number, served.deployment.name
        self.members: list[LiveReplica] = []
        self._num_wanted = served.unit
        self.is_announced = False
        """Whether control knows the instance: all its replicas were up once."""

    def has_room_for(self, pool: str) -> bool:
        """Whether the instance has room for one more replica of this pool."""
        return sum(member.pool == pool for member in self.members) < self._num_wanted.get(pool, 0)

    @property
    def is_complete(self) -> bool:
        """Whether all replicas of the instance exist. They may be down."""
        return not any(self.has_room_for(pool) for pool in self._num_wanted)


class ComboInstances:
    """All instances of a gateway, numbered as the simulator numbers them."""

    def __init__(self) -> None:
        self._instances: list[ComboInstance] = []
        self._numbers = count(1)
        self._by_replica: dict[int, ComboInstance] = {}

    def join(self, replica: LiveReplica, served: ServedPool) -> None:
        """Put a replica into the first instance with room for it, or into a new instance."""
        name, pool = served.deployment.name, served.pool.name
        instance = next((each for each in self._instances if each.name == name and each.has_room_for(pool)), None)
        if instance is None:
            instance = ComboInstance(next(self._numbers), served)
            self._instances.append(instance)
        instance.members.append(replica)
        self._by_replica[replica.id] = instance
        replica.combo, replica.deployment = instance.number, name
        if served.combo is not None:
            replica.is_of_combo, replica.goodput_rps = True, served.combo.goodput_rps
            replica.is_single_phase = replica.adapter.dual_dispatch and replica.role != "mixed"

    def of(self, replica: LiveReplica) -> ComboInstance:
        """The instance that contains or contained a replica."""
        return self._by_replica[replica.id]

    def named(self, name: str) -> list[ComboInstance]:
        """The instances of a pool or combo, the oldest first."""
        return [instance for instance in self._instances if instance.name == name]

    def leave(self, replica: LiveReplica) -> None:
        """Free a replica's place in its instance."""
        instance = self._by_replica[replica.id]
        if replica in instance.members:
            instance.members.remove(replica)
        if not instance.members and instance in self._instances:
            self._instances.remove(instance)


def in_order(pools: Sequence[ServedPool]) -> Iterator[tuple[ServedPool, str]]:
    """All endpoints in the simulator's numbering: pools first, then combos, instance by instance."""
    for served in pools:
        if served.combo is None:
            yield from ((served, url) for url in served.endpoints)
    combos = {served.combo.name: served.combo for served in pools if served.combo is not None}
    for combo in combos.values():
        parts = [served for served in pools if served.combo is combo]
        for instance in range(combo.replicas):
            for part in parts:
                num = part.pool.replicas
                yield from ((part, url) for url in part.endpoints[instance * num : (instance + 1) * num])
