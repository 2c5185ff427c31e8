"""Which replicas belong together: each of a pool is a unit of its own, those of one combo are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headway.core.fleet import Combo
from headway.gateway.fleet.replica import LiveReplica

if TYPE_CHECKING:
    from headway.gateway.plan import Served


class ComboInstance:
    """What comes and goes as one."""

    def __init__(self, number: int, served: Served) -> None:
        self.number, self.name = number, served.deployment.name
        self.members: list[LiveReplica] = []
        parts = served.combo.parts if served.combo is not None else ()
        self._wanted = {part.name: part.replicas for part in parts} or {served.pool.name: 1}
        self.is_announced = False
        """Control has been told that all of it is up."""

    def lacks(self, pool: str) -> bool:
        """It has room for one more of these."""
        return sum(member.pool == pool for member in self.members) < self._wanted.get(pool, 0)

    @property
    def is_whole(self) -> bool:
        """All of its replicas are somewhere."""
        return not any(self.lacks(pool) for pool in self._wanted)


class ComboInstances:
    """All of a gateway's, numbered as the simulator numbers them."""

    def __init__(self) -> None:
        self._units: list[ComboInstance] = []
        self._num = 0
        self._of: dict[int, ComboInstance] = {}
        """By replica."""

    def join(self, replica: LiveReplica, served: Served) -> None:
        """A replica takes its place: in the first combo that lacks one of its kind, else in a new one."""
        name, pool = served.deployment.name, served.pool.name
        unit = next((unit for unit in self._units if unit.name == name and unit.lacks(pool)), None)
        if unit is None:
            self._num += 1
            unit = ComboInstance(self._num, served)
            self._units.append(unit)
        unit.members.append(replica)
        self._of[replica.id] = unit
        replica.combo, replica.deployment, replica.role = unit.number, name, served.pool.role
        if served.combo is not None:
            replica.is_of_combo, replica.goodput_rps = True, served.combo.goodput_rps
            replica.is_single_phase = replica.adapter.dual_dispatch and replica.role != "mixed"

    def of(self, replica: LiveReplica) -> ComboInstance:
        """Who a replica is with, also when it has left."""
        return self._of[replica.id]

    def called(self, name: str) -> list[ComboInstance]:
        """Those of a pool or kind of combo that are there, the oldest first."""
        return [unit for unit in self._units if unit.name == name]

    def leave(self, replica: LiveReplica) -> None:
        """A replica's place is free."""
        unit = self._of[replica.id]
        if replica in unit.members:
            unit.members.remove(replica)
        if not unit.members and unit in self._units:
            self._units.remove(unit)


def in_order(pools: Sequence[Served]) -> Iterator[tuple[Served, str]]:
    """Every endpoint of these, as the simulator numbers replicas: pools first, then combos, one by one."""
    for served in pools:
        if served.combo is None:
            yield from ((served, url) for url in served.endpoints)
    for combo in combos_of(pools):
        parts = [served for served in pools if served.combo is combo]
        for unit in range(combo.replicas):
            for part in parts:
                num = part.pool.replicas
                yield from ((part, url) for url in part.endpoints[unit * num : (unit + 1) * num])


def combos_of(pools: Sequence[Served]) -> list[Combo]:
    """Those of which these are parts."""
    return list({served.combo.name: served.combo for served in pools if served.combo is not None}.values())
