"""The autopilot's state as a gateway shows it, and the controls for administrators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

from headway.gateway.telemetry.metrics import Metric, Sample

STAGES = ("idle", "staged", "judged", "promoted", "rolled back")
_Num = Annotated[int, Meta(ge=0)]


class PastChange(Struct, forbid_unknown_fields=True):
    """A change that the autopilot tried."""

    time_s: float
    """End of the trial, in seconds since 1970."""
    change: str
    outcome: Literal["promoted", "rolled back"]
    reason: str
    pairs: _Num


class AutopilotState(Struct, forbid_unknown_fields=True):
    """The stage of the current or last change, and the results of earlier changes."""

    stage: Literal["idle", "staged", "judged", "promoted", "rolled back"]
    stopped: bool
    """Whether the kill switch is on: no change begins."""
    change: str | None
    """The change as `headway advise` names it; null if none was tried."""
    version: str | None
    """The file that contains the change."""
    share: float | None
    """Share of the time, and therefore of the traffic, during which the change is in effect while it is staged."""
    pairs: _Num
    """Number of pairs of periods with and without the change."""
    gain: float | None
    """SLO attainment with the change minus attainment without it, mean over the pairs."""
    saved: float | None
    """Share of the dollars that is saved with the change, mean over the pairs."""
    reason: str
    """Reason for the verdict, or the reason why no change is tried."""
    past: list[PastChange]
    """The last changes, newest first."""
    note: str = ""
    """Reason why no change is tried now."""
    drift: list[str] = []
    """Replicas that became slower or faster than their profile during the trial, and the term that moved. The drift
    affects both sides of each pair."""


class AutopilotControls(Protocol):
    """The autopilot's controls, for the gateway's endpoints."""

    def state(self) -> AutopilotState: ...
    async def stop(self) -> None:
        """Take back the change on trial, and begin no other until `resume`."""

    async def resume(self) -> None: ...
    async def look_now(self) -> None:
        """Look for a change soon, at any time of day."""


def metrics(autopilot: AutopilotControls) -> Iterator[Metric]:
    """Metrics of the stage, of past changes and of the gain so far."""
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
    yield "headway_autopilot_saved", [] if state.saved is None else [({}, state.saved)]
