"""What befalls replicas at times that are known beforehand: crashes, streams that break, changes of role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.control.control import Control
from headway.core.errors import HeadwayError
from headway.core.fleet import Fault, RoleChange
from headway.sim.kernel import BEFORE, COMMAND, Kernel
from headway.sim.lifetime import Lifetime
from headway.sim.replica import Replica
from headway.sim.transfers import KvTransfers


class Incidents:
    """All of a run's."""

    def __init__(
        self,
        kernel: Kernel,
        replicas: Sequence[Replica],
        lifetimes: Sequence[Lifetime],
        mover: KvTransfers,
        control: Control,
    ) -> None:
        self._kernel, self._mover, self._control = kernel, mover, control
        self._replicas, self._lifetimes = replicas, lifetimes
        self.num_to_come = 0
        """Those of which control will still hear."""
        self.last_s = 0.0
        """The last crash."""

    def expect(self, faults: Sequence[Fault], roles: Sequence[RoleChange]) -> None:
        """Let them happen. HeadwayError where there is no such replica."""
        for i, fault in enumerate(faults):
            self._check(f"faults[{i}]", fault.replica)
            self._at(fault.at_s, self._crash if fault.streams is None else self._break, fault)
        for i, change in enumerate(roles):
            self._check(f"roles[{i}]", change.replica)
            self._at(change.at_s, self._switch, change)

    def _check(self, where: str, replica: int) -> None:
        if not 0 <= replica < len(self._replicas):
            raise HeadwayError(f"{where}.replica: {replica}; the fleet has 0 to {len(self._replicas) - 1}")

    def _at(self, time_s: float, action: Callable[[float, Any], None], what: Fault | RoleChange) -> None:
        def happens(now: float, what: Any) -> None:
            self.num_to_come -= 1
            action(now, what)

        self.num_to_come += 1
        self._kernel.at(time_s, COMMAND, what.replica - BEFORE, happens, what)

    def _crash(self, now: float, fault: Fault) -> None:
        replica = self._replicas[fault.replica]
        if not replica.is_up:
            return
        self.last_s = now
        self._mover.crashed(replica.id, now)
        lost = replica.crash(now)
        self._lifetimes[replica.id].out(now)
        if fault.down_s is not None:
            self._at(now + fault.down_s, self._recover, fault)
        self._control.on_crashed(replica.id, lost, now)

    def _recover(self, now: float, fault: Fault) -> None:
        lifetime = self._lifetimes[fault.replica]
        if lifetime.end_s <= now:
            return  # given back meanwhile
        lifetime.back(now)
        self._replicas[fault.replica].recover()
        self._control.on_recovered(fault.replica, now)

    def _break(self, now: float, fault: Fault) -> None:
        assert fault.streams is not None
        self._mover.lose_streams(fault.replica, fault.streams, fault.down_s, now)

    def _switch(self, now: float, change: RoleChange) -> None:
        if change.switch_s:
            self._at(now + change.switch_s, self._switched, change)
        self._control.change_role(change.replica, change.role, now, is_ready=not change.switch_s)

    def _switched(self, now: float, change: RoleChange) -> None:
        self._control.on_role_changed(change.replica, now)
