"""Combos that the gateway starts: control hears of one when all of it is up, as in a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.control.scaling import PoolState
from headway.control.service import Member
from headway.core.fleet import Combo, Pool
from headway.gateway.fleet.combos import ComboInstance, combos_of
from headway.gateway.fleet.replica import LiveReplica

if TYPE_CHECKING:
    from headway.gateway.fleet.scaling import LiveScaling
    from headway.gateway.gateway import Gateway


class ComboReadiness:
    """All of them, where there is a scaler. `states` are what it sees, by name, and `starts` who knows of the parts."""

    def __init__(self, gateway: Gateway, states: dict[str, PoolState], starts: LiveScaling) -> None:
        self._gateway, self._states, self._starts = gateway, states, starts
        self._waiting: set[int] = set()
        """Replicas that are up, and whose combos are not yet."""
        self._replaced: set[int] = set()
        """Replicas that ended, in whose places others are started."""
        self._asked: dict[str, int] = {}
        """By part, how many pods a cluster is to have; parts that are processes are not here."""

    def asks(self, part: str, num: int) -> None:
        """A cluster is to have so many pods of a part."""
        self._asked[part] = num

    def expect(self, combo: Combo) -> None:
        """Of what a cluster is to have, whole combos that control has not heard of yet are on their way."""
        state = self._states.get(combo.name)
        if state is None or any(part.name not in self._asked for part in combo.parts):
            return
        num = min(self._asked[part.name] // part.replicas for part in combo.parts)
        held = {member.view.combo for member in state.members}
        state.num_starting, state.num_failed = max(num - len(held), 0), 0
        self.recount(combo.name)

    def recount(self, name: str, less: int = 0) -> None:
        """Of combos that control has not heard of, those that lack a part that does not start have failed, and the
        others are starting. `less`: so many are not expected any more."""
        combo = next((each for each in combos_of(self._gateway.plan.pools) if each.name == name), None)
        state = self._states.get(name)
        if state is None or combo is None:
            return
        if all(part.name in self._asked for part in combo.parts):
            less = 0  # a cluster has been asked for less already
        num_awaited = state.num_starting + state.num_failed - less
        announced = [unit for unit in self._gateway.units.called(name) if unit.is_announced]
        lacking = max(-(-self._num_failed(part, announced) // part.replicas) for part in combo.parts)
        state.num_failed = min(lacking, num_awaited)
        state.num_starting = num_awaited - state.num_failed

    def _num_failed(self, part: Pool, announced: Sequence[ComboInstance]) -> int:
        """Replicas of a part that do not start, besides those that combos which serve could do with."""
        well = sum(each.pool == part.name and not self._starts.is_starting(each)
                   for unit in announced for each in unit.members)  # fmt: skip
        return max(self._starts.failed_of[part.name] - (len(announced) * part.replicas - well), 0)

    def call_off(self, name: str) -> list[LiveReplica]:
        """One that has failed is not waited for any more: what there is of it, which is to go."""
        found = [unit for unit in self._gateway.units.called(name) if not unit.is_announced]
        members = found[-1].members[:] if found else []
        for member in members:
            self._waiting.discard(member.id)
            self._replaced.add(member.id)
            self._gateway.units.leave(member)
        return members

    def waits(self, replica: LiveReplica) -> bool:
        """It is up, and not to be used until the rest of its combo is."""
        return replica.id in self._waiting

    def up(self, replica: LiveReplica) -> None:
        """One of a combo is up for the first time: the combo's last, one of those before, or one in another's place."""
        unit = self._gateway.units.of(replica)
        if unit.is_announced:
            self._use(unit, replica)
            return
        self._waiting.add(replica.id)
        if not unit.is_whole or any(member.id not in self._waiting for member in unit.members):
            return
        unit.is_announced = True
        members = [self._member(each) for each in unit.members]
        for each, member in zip(unit.members, members, strict=True):
            self._waiting.discard(each.id)
            member.is_up = self._gateway.health.is_up(each)
        self._gateway.driver.control.on_unit_started(unit.name, members, self._gateway.driver.now)

    def _use(self, unit: ComboInstance, replica: LiveReplica) -> None:
        """Control knows its combo already."""
        self._states[unit.name].members.append(self._member(replica))
        self._gateway.driver.replica_up(replica)

    def _member(self, replica: LiveReplica) -> Member:
        member = self._gateway.driver.services[replica.model].member(replica.id)
        assert member is not None
        return member

    def lost(self, replica: LiveReplica, again: bool) -> None:
        """One has ended by itself. `again`: another one is started in its place."""
        units = self._gateway.units
        unit, state = units.of(replica), self._states.get(replica.deployment)
        units.leave(replica)
        self._waiting.discard(replica.id)
        if state is None or not again:
            return
        self._replaced.add(replica.id)
        state.members = [member for member in state.members if member.view is not replica]
        if unit.is_announced and not unit.members:
            state.num_starting += 1  # all of it has ended, and starts as a new one

    def gone(self, replica: LiveReplica) -> None:
        """One was taken away. What is left of a combo that was starting is used as it is."""
        unit = self._gateway.units.of(replica)
        self._waiting.discard(replica.id)
        if replica.id in self._replaced or unit.is_announced:
            self._replaced.discard(replica.id)
            return
        unit.is_announced = True
        self._states[unit.name].num_starting -= 1
        for each in [each for each in unit.members if each.id in self._waiting]:
            self._waiting.discard(each.id)
            self._use(unit, each)
