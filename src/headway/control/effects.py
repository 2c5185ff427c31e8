"""The effects that control requests from a driver. The simulator runs them in virtual time, the gateway in real
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headway.control.live import Live
from headway.core.fleet import Role
from headway.core.record import Outcome


class Effects(Protocol):
    """Effects on requests, and on replica roles."""

    def start(self, live: Live, replica: int, now: float) -> None:
        """Send the request to a replica."""

    def cancel(self, live: Live, now: float) -> None:
        """Abort the request at its replica. The driver answers with `Control.on_cancelled`."""

    def move(self, live: Live, target: int, stage_blocks: int | None, now: float) -> None:
        """Migrate the request to another replica if possible. The driver answers with `Control.on_moved`."""

    def pause(self, live: Live, now: float) -> None:
        """Take a running request off its replica and drop its KV cache. The driver answers with `Control.on_paused`,
        unless the request ends first."""

    def hand_over(self, live: Live, target: int, now: float) -> None:
        """Move a prefilled request to its decode replica, or let it decode where it is."""

    def judge(self, live: Live, now: float) -> None:
        """Have a judge score the answer of a cascade stage. The driver answers with `Control.on_judged`."""

    def set_role(self, replica: int, role: Role) -> None:
        """Change a replica's role, effective now."""

    def call_at(self, time_s: float, action: Callable[[float, Any], None], argument: Any) -> None:
        """Call `action(time_s, argument)` at `time_s`."""

    def notify_ended(self, live: Live, now: float, outcome: Outcome) -> None:
        """Report a request's end to its sender (only if control was created with `notify`)."""


class ScalingEffects(Protocol):
    """Effects on the number of replicas."""

    def start_replica(self, deployment: str, now: float) -> None:
        """Start one more unit of a pool or combo. The driver answers with `Control.on_unit_started`."""

    def drain(self, replica: int, on: bool) -> None:
        """Start or stop draining a replica."""

    def stop_replica(self, replica: int, now: float) -> None:
        """Release a replica that has no requests."""
