"""The stages of a change that the autopilot tries: a state value, and a function from a state and an event to the next
state.

Only one change exists at a time. The caller writes the state before it carries out the effects, so that the state shows
the remaining work after a crash: a judged change is carried out again, which is harmless, and a staged change
continues.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headway.autopilot.evidence import Bounds, bounds, is_above, is_below
from headway.autopilot.staging import Staging
from headway.core.errors import HeadwayError

Stage = Literal["idle", "staged", "judged", "promoted", "rolled back"]
Verdict = Literal["promote", "roll back"]
ALPHA = 0.05
"""Largest probability that a change without effect is promoted, over all tests of the change."""
HARM = 0.1
"""Loss of SLO attainment in each of the last two pairs that reverts a change at once."""


class Limits(Struct, frozen=True):
    """The changes and the cost that the operator allows."""

    allow: tuple[str, ...]
    max_usd_per_h: float | None
    """Highest cost per hour; None: no bound."""


class Change(Struct, frozen=True):
    """A change that is or was tried."""

    name: str
    """The name that `headway advise` gives it."""
    kinds: tuple[str, ...]
    before: str
    """The version of the fleet file before the change."""
    version: str
    """The version of the fleet file with the change."""
    predicted: Bounds
    """Predicted gain of SLO attainment."""
    most_usd_per_h: float | None
    """The largest possible cost of the fleet with the change and all its replicas. None: their number is unbounded."""
    staging: Staging


class State(Struct, frozen=True):
    stage: Stage = "idle"
    change: Change | None = None
    """The current or last change; None if there was none."""
    gains: tuple[float, ...] = ()
    """SLO attainment with the change minus attainment without it, for each pair so far."""
    verdict: Verdict | None = None
    reason: str = ""
    """Reason of the verdict."""
    is_stopped: bool = False
    """Whether the kill switch is on: no change begins."""


class Staged(Struct, frozen=True):
    """A change begins, and runs in some periods."""

    change: Change
    is_frozen: bool
    """Whether no change may begin at this time."""


class Observed(Struct, frozen=True):
    """Another pair has ended."""

    gain: float


class Withdrawn(Struct, frozen=True):
    """A change cannot go on."""

    reason: str


class CarriedOut(Struct, frozen=True):
    """The fleet file is set according to the verdict, and served."""


class Stopped(Struct, frozen=True):
    """The kill switch: the change on trial is reverted, and none begins."""


class Resumed(Struct, frozen=True):
    """The kill switch is released: changes may begin again."""


Event = Staged | Observed | Withdrawn | CarriedOut | Stopped | Resumed
TRANSITIONS: dict[tuple[Stage, type], tuple[Stage, ...]] = {
    ("idle", Staged): ("staged",),
    ("promoted", Staged): ("staged",),
    ("rolled back", Staged): ("staged",),
    ("staged", Observed): ("staged", "judged"),
    ("staged", Withdrawn): ("judged",),
    ("staged", Stopped): ("judged",),
    ("judged", Withdrawn): ("judged",),
    ("judged", CarriedOut): ("promoted", "rolled back"),
    **{(stage, Stopped): (stage,) for stage in ("idle", "judged", "promoted", "rolled back")},
    **{(stage, Resumed): (stage,) for stage in ("idle", "staged", "judged", "promoted", "rolled back")},
}
"""Allowed next stages by stage and event. Unlisted combinations are errors."""


NEW = ("idle", "promoted", "rolled back")
"""Stages in which a change may begin."""


def why_not(state: State, change: Change, limits: Limits, is_frozen: bool) -> str:
    """Why a change may not begin; empty if it may."""
    if state.is_stopped:
        return "the autopilot is stopped"
    if state.stage not in NEW and state.change is not None:
        return f"another change is {state.stage}: {state.change.name}"
    if is_frozen:
        return "no change begins in a freeze window"
    if more := [kind for kind in change.kinds if kind not in limits.allow]:
        return f"not among the allowed kinds: {', '.join(more)}"
    return too_dear(change.most_usd_per_h, limits)


def too_dear(most_usd_per_h: float | None, limits: Limits) -> str:
    """Why a fleet of this cost is not allowed; empty if it is allowed."""
    if limits.max_usd_per_h is None:
        return ""
    if most_usd_per_h is None:
        return "nothing bounds what the fleet may cost: a pool that scales has no max_replicas"
    if most_usd_per_h > limits.max_usd_per_h:
        return f"the fleet may cost ${most_usd_per_h:.2f} an hour, above the ${limits.max_usd_per_h:.2f} allowed"
    return ""


def step(state: State, event: Event, limits: Limits) -> State:
    """The state after an event. HeadwayError, without other effects, if the event is not allowed now."""
    if (state.stage, type(event)) not in TRANSITIONS:
        raise HeadwayError(f"autopilot: {type(event).__name__.lower()} is impossible while a change is {state.stage}")
    match event:
        case Staged():
            if why := why_not(state, event.change, limits, event.is_frozen):
                raise HeadwayError(f"autopilot: {event.change.name}: {why}")
            return State("staged", event.change)
        case Observed():
            gains = (*state.gains, event.gain)
            verdict, reason = judged(gains, state.change)
            stage: Stage = "staged" if verdict is None else "judged"
            return replace(state, stage=stage, gains=gains, verdict=verdict, reason=reason)
        case Withdrawn():
            return replace(state, stage="judged", verdict="roll back", reason=event.reason)
        case CarriedOut():
            return replace(state, stage="promoted" if state.verdict == "promote" else "rolled back")
        case Stopped():
            if state.stage == "staged":
                state = replace(state, stage="judged", verdict="roll back", reason="stopped by the operator")
            return replace(state, is_stopped=True)
        case Resumed():
            return replace(state, is_stopped=False)


def judged(gains: tuple[float, ...], change: Change | None) -> tuple[Verdict | None, str]:
    """The verdict and its reason after these pairs; None while undecided."""
    assert change is not None
    if len(gains) >= 2 and max(gains[-2:]) < -HARM:
        return "roll back", f"it loses more than {100 * HARM:.0f} points in two pairs of periods in a row"
    least = max(change.predicted.low, 0.0)
    is_short = is_below(gains, least, ALPHA)
    if is_above(gains, 0.0, ALPHA):
        return "promote", f"it adds {_seen(gains)}{', less than predicted' if is_short else ''}"
    if is_short:
        return "roll back", f"it adds {_seen(gains)}; at least {_points(least)} were predicted"
    if len(gains) >= change.staging.most_pairs:
        return "roll back", f"no gain is certain in the time given: {_seen(gains)}"
    return None, ""


def _seen(gains: tuple[float, ...]) -> str:
    found = bounds(gains, ALPHA)
    return f"{_points(found.low)} to {_points(found.high)} points of SLO attainment in {len(gains)} pairs of periods"


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def serving(state: State) -> tuple[str, ...]:
    """The versions that may be the fleet file now; empty if the autopilot has changed nothing."""
    change = state.change
    if change is None:
        return ()
    if state.stage == "judged" and state.verdict == "promote":
        return change.before, change.version  # an interruption may have left either version
    return (change.version if state.stage == "promoted" else change.before,)
