"""The effects that control asks of a driver: the simulator acts in virtual time, the gateway in real time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headway.control.live import Live
from headway.core.fleet import Role
from headway.core.record import Outcome


class Effects(Protocol):
    """Effects on requests, and on the roles of replicas."""

    def start(self, live: Live, replica: int, now: float) -> None:
        """Send the request to a replica."""

    def cancel(self, live: Live, now: float) -> None:
        """Abort the request at its replica. The driver answers with `Control.on_cancelled`."""

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Migrate the request to another replica if possible. The driver answers with `Control.on_moved`."""

    def pause(self, live: Live, now: float) -> None:
        """Take a running request off its replica, without its KV cache. The driver answers with `Control.on_paused`,
        unless the request ends before."""

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Migrate a request after its prefill to the replica that decodes it, or let it decode where it is."""

    def judge(self, live: Live, now: float) -> None:
        """Have the answer of a cascade stage scored. The driver answers with `Control.on_judged`."""

    def set_role(self, replica: int, role: Role) -> None:
        """Change the role of a replica, effective now."""

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        """Call `action(time_s, argument)` at `time_s`."""

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Report the end of a request to its sender (only if control was created with `notify`)."""


class ScalingEffects(Protocol):
    """Effects on the number of replicas."""

    def start_replica(self, deployment: str, now: float) -> None:
        """Acquire one more unit of a pool or combo. The driver answers with `Control.on_unit_started`."""

    def drain(self, replica: int, on: bool) -> None:
        """Start or stop draining a replica."""

    def stop_replica(self, replica: int, now: float) -> None:
        """Give back a replica that has no requests."""
