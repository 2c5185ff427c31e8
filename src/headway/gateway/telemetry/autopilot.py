"""What a gateway shows of its autopilot, and how administrators reach it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from headway.gateway.telemetry.metrics import Metric, Sample

STAGES = ("idle", "staged", "judged", "promoted", "rolled back")
_Num = Annotated[int, Meta(ge=0)]


class PastChange(Struct, forbid_unknown_fields=True):
    """A change that was tried."""

    time_s: float
    """Its end, in seconds since 1970."""
    change: str
    outcome: Literal["promoted", "rolled back"]
    reason: str
    pairs: _Num


class AutopilotState(Struct, forbid_unknown_fields=True):
    """The stage of the present or last change, and what became of those before."""

    stage: Literal["idle", "staged", "judged", "promoted", "rolled back"]
    stopped: bool
    """By the kill switch: no change begins."""
    change: str | None
    """As `headway advise` names it; null: none was tried."""
    version: str | None
    """The file with the change."""
    share: float | None
    """Of the time, and so of the traffic, that the change serves while it is staged."""
    pairs: _Num
    """Pairs of periods with and without the change."""
    gain: float | None
    """SLO attainment with it less that without it, the mean over the pairs."""
    reason: str
    """Of the verdict, or why nothing is tried."""
    past: list[PastChange]
    """The last ones, the newest first."""
    note: str = ""
    """Why nothing is tried now."""
    drift: list[str] = []
    """Replicas that became slower or faster than their profile while the change was tried, and in which term. It counts
    for both sides of each pair."""


class AutopilotControls(Protocol):
    """An autopilot as the gateway's endpoints see it."""

    def state(self) -> AutopilotState: ...
    async def stop(self) -> None:
        """Take back what is tried, and begin nothing until `resume`."""

    async def resume(self) -> None: ...
    async def look_now(self) -> None:
        """Look for a change soon, whatever the time of day."""


def metrics(autopilot: AutopilotControls) -> Iterator[Metric]:
    """The metrics of the stage, of past changes and of the gain so far."""
    state = autopilot.state()
    stages: list[Sample] = [({"stage": stage}, float(stage == state.stage)) for stage in STAGES]
    yield "headway_autopilot_stage", stages
    yield "headway_autopilot_stopped", [({}, float(state.stopped))]
    outcomes: list[Sample] = [
        ({"outcome": outcome}, float(sum(each.outcome == outcome for each in state.past)))
        for outcome in ("promoted", "rolled back")
    ]
    yield "headway_autopilot_changes", outcomes
    yield "headway_autopilot_pairs", [({}, float(state.pairs))]
    yield "headway_autopilot_gain", [] if state.gain is None else [({}, state.gain)]
