"""Incidents at given times: crashes, broken streams, slow replicas and role changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.control.control import Control
from headway.core.errors import HeadwayError
from headway.core.fleet import Fault, RoleChange
from headway.sim.fleet import SimulatedFleet
from headway.sim.kernel import BEFORE, COMMAND, Kernel
from headway.sim.transfers import KvTransfers


class Incidents:
    """The incidents of one run."""

    def __init__(self, kernel: Kernel, fleet: SimulatedFleet, transfers: KvTransfers, control: Control) -> None:
        self._kernel, self._transfers, self._control = kernel, transfers, control
        self._replicas, self._lifetimes = fleet.replicas, fleet.lifetimes
        self.num_to_come = 0
        """Number of incidents and consequences that have not happened yet."""
        self.last_s = 0.0
        """Time of the last crash."""

    def schedule(self, faults: Sequence[Fault], roles: Sequence[RoleChange]) -> None:
        """Schedule incidents. Raises HeadwayError if a replica does not exist."""
        for i, fault in enumerate(faults):
            self._check(f"faults[{i}]", fault.replica)
            self._at(fault.at_s, self._happening(fault), fault)
        for i, change in enumerate(roles):
            self._check(f"roles[{i}]", change.replica)
            self._at(change.at_s, self._change_role, change)

    def _check(self, where: str, replica: int) -> None:
        if not 0 <= replica < len(self._replicas):
            raise HeadwayError(f"{where}.replica: {replica}; the fleet has 0 to {len(self._replicas) - 1}")

    def _at(self, time_s: float, action: Callable[[float, Any], None], incident: Fault | RoleChange) -> None:
        def happen(now: float, incident: Any) -> None:
            self.num_to_come -= 1
            action(now, incident)

        self.num_to_come += 1
        self._kernel.at(time_s, COMMAND, incident.replica - BEFORE, happen, incident)

    def _happening(self, fault: Fault) -> Callable[[float, Any], None]:
        if fault.slowdown is not None:
            return self._slow_down
        return self._crash if fault.streams is None else self._break_streams

    def _slow_down(self, now: float, fault: Fault) -> None:
        assert fault.slowdown is not None
        self._replicas[fault.replica].slow_down(fault.slowdown, now)
        if fault.down_s is not None:
            self._at(now + fault.down_s, self._speed_up, fault)

    def _speed_up(self, now: float, fault: Fault) -> None:
        self._replicas[fault.replica].slow_down(1.0, now)

    def _crash(self, now: float, fault: Fault) -> None:
        replica = self._replicas[fault.replica]
        if not replica.is_up:
            return
        self.last_s = now
        self._transfers.abandon_all(replica.id, now)
        lost = replica.crash(now)
        self._lifetimes[replica.id].start_down(now)
        if fault.down_s is not None:
            self._at(now + fault.down_s, self._recover, fault)
        self._control.on_crashed(replica.id, lost, now)

    def _recover(self, now: float, fault: Fault) -> None:
        lifetime = self._lifetimes[fault.replica]
        if lifetime.end_s <= now:
            return  # the replica was released meanwhile
        lifetime.end_down(now)
        self._replicas[fault.replica].is_up = True
        self._control.on_recovered(fault.replica, now)

    def _break_streams(self, now: float, fault: Fault) -> None:
        assert fault.streams is not None
        self._transfers.lose_streams(fault.replica, fault.streams, fault.down_s, now)

    def _change_role(self, now: float, change: RoleChange) -> None:
        if change.switch_s:
            self._at(now + change.switch_s, self._complete_role_change, change)
        self._control.change_role(change.replica, change.role, now, is_ready=not change.switch_s)

    def _complete_role_change(self, now: float, change: RoleChange) -> None:
        self._control.on_role_changed(change.replica, now)
