"""Combos that the gateway starts: control learns of an instance when all of it is up, as in a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from headway.control.scaling import PoolState
from headway.control.service import Member
from headway.core.fleet import Combo, Pool
from headway.gateway.fleet.combos import ComboInstance
from headway.gateway.fleet.membership import FleetHost, LiveFleet
from headway.gateway.fleet.replica import LiveReplica


class ComboReadiness:
    """Announces complete instances to control, and keeps the scaler's counts of combos."""

    def __init__(
        self, host: FleetHost, fleet: LiveFleet, combos: Sequence[Combo], states: dict[str, PoolState]
    ) -> None:
        """`states` are the scaler's counts by name; empty without a scaler."""
        self._host, self._fleet, self._states = host, fleet, states
        self._combos = {combo.name: combo for combo in combos}
        self._waiting: set[int] = set()
        """Replicas that are up, and whose instances are not."""
        self._replaced: set[int] = set()
        """Replicas that have ended or were given up, and whose places in their instances are free."""
        self._num_pods: dict[str, int] = {}
        """By part, how many pods were requested of a cluster; parts that are processes are not in it."""

    def pods_requested(self, part: str, num: int) -> None:
        self._num_pods[part] = num

    def expect(self, combo: Combo) -> None:
        """Derive from the requested pods how many whole instances are starting."""
        state = self._states.get(combo.name)
        if state is None or any(part.name not in self._num_pods for part in combo.parts):
            return
        num = min(self._num_pods[part.name] // part.replicas for part in combo.parts)
        num_known = len({member.view.combo for member in state.members})
        state.num_starting, state.num_failed = max(num - num_known, 0), 0
        self.recount(combo.name)

    def recount(self, name: str, num_given_up: int = 0) -> None:
        """Recount unannounced instances: one with a part that failed counts as failed, the rest as starting."""
        combo, state = self._combos.get(name), self._states.get(name)
        if state is None or combo is None:
            return
        if all(part.name in self._num_pods for part in combo.parts):
            num_given_up = 0  # the requested pods have been reduced already
        num_unannounced = state.num_starting + state.num_failed - num_given_up
        announced = [instance for instance in self._fleet.combos.named(name) if instance.is_announced]
        num_failed = max(-(-self._num_failed(part, announced) // part.replicas) for part in combo.parts)
        state.num_failed = min(num_failed, num_unannounced)
        state.num_starting = num_unannounced - state.num_failed

    def _num_failed(self, part: Pool, announced: Sequence[ComboInstance]) -> int:
        """Failed replicas of a part, without those that announced instances lack."""
        num_present = sum(
            member.pool == part.name and member.id not in self._fleet.starting
            for instance in announced for member in instance.members
        )  # fmt: skip
        return max(self._fleet.num_failed[part.name] - (len(announced) * part.replicas - num_present), 0)

    def give_up(self, name: str) -> list[LiveReplica]:
        """Give up the newest unannounced instance. Returns its replicas, which are to be removed."""
        instances = [instance for instance in self._fleet.combos.named(name) if not instance.is_announced]
        members = instances[-1].members[:] if instances else []
        for member in members:
            self._waiting.discard(member.id)
            self._replaced.add(member.id)
            self._fleet.combos.leave(member)
        return members

    def waits(self, replica: LiveReplica) -> bool:
        """The replica is up, and must not be used before the rest of its instance is up."""
        return replica.id in self._waiting

    def replica_up(self, replica: LiveReplica) -> None:
        """A replica is up for the first time: announce its instance if that is complete."""
        instance = self._fleet.combos.of(replica)
        if instance.is_announced:
            self._add_to_announced(instance, replica)
            return
        self._waiting.add(replica.id)
        if not instance.is_complete or any(member.id not in self._waiting for member in instance.members):
            return
        instance.is_announced = True
        members = [self._member(replica) for replica in instance.members]
        for each, member in zip(instance.members, members, strict=True):
            self._waiting.discard(each.id)
            member.is_up = self._host.health.is_up(each)
        control = self._host.driver.control
        control.on_unit_started(instance.name, members, self._host.driver.now)

    def _add_to_announced(self, instance: ComboInstance, replica: LiveReplica) -> None:
        self._states[instance.name].members.append(self._member(replica))
        self._host.driver.replica_up(replica)

    def _member(self, replica: LiveReplica) -> Member:
        member = self._host.driver.services[replica.model].member(replica.id)
        assert member is not None
        return member

    def replica_lost(self, replica: LiveReplica, is_replaced: bool) -> None:
        """A replica has ended by itself. `is_replaced`: another one is started in its place."""
        instance, state = self._fleet.combos.of(replica), self._states.get(replica.deployment)
        self._fleet.combos.leave(replica)
        self._waiting.discard(replica.id)
        if state is None or not is_replaced:
            return
        self._replaced.add(replica.id)
        state.members = [member for member in state.members if member.view is not replica]
        if instance.is_announced and not instance.members:
            state.num_starting += 1  # the whole instance has ended, and starts anew

    def replica_removed(self, replica: LiveReplica) -> None:
        """A replica was removed. The rest of an instance that was starting is used as it is."""
        instance = self._fleet.combos.of(replica)
        self._waiting.discard(replica.id)
        if replica.id in self._replaced or instance.is_announced:
            self._replaced.discard(replica.id)
            return
        instance.is_announced = True
        self._states[instance.name].num_starting -= 1
        for each in [each for each in instance.members if each.id in self._waiting]:
            self._waiting.discard(each.id)
            self._add_to_announced(instance, each)
