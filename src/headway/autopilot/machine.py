"""The stages of a change that the autopilot tries: a value, and a function from it and an event to the next one.

Only one change exists at a time. Whoever carries out its effects writes the state first, so that after a crash the
state says what is to be done: a judged change is carried out again, which does no harm, and a staged one goes on.
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
"""Chance at most that a change without effect is promoted, over all looks at it."""
HARM = 0.1
"""Loss of SLO attainment in each of the last two pairs at which a change is taken back at once."""


class Limits(Struct, frozen=True):
    """The changes and the cost that the operator allows."""

    allow: tuple[str, ...]
    max_usd_per_h: float | None
    """None: no bound."""


class Change(Struct, frozen=True):
    """One change that is tried, or was."""

    name: str
    """As `headway advise` names it."""
    kinds: tuple[str, ...]
    before: str
    """The version of the fleet file that it changes."""
    version: str
    """The version of the fleet file with it."""
    predicted: Bounds
    """Of the SLO attainment that it adds."""
    most_usd_per_h: float | None
    """What the fleet may cost with it, with all the replicas that it may have. None: nothing bounds their number."""
    staging: Staging


class State(Struct, frozen=True):
    stage: Stage = "idle"
    change: Change | None = None
    """The present change, or the last one; None: there was none."""
    gains: tuple[float, ...] = ()
    """SLO attainment with the change less that without it, of each pair so far."""
    verdict: Verdict | None = None
    reason: str = ""
    """Of the verdict."""
    is_stopped: bool = False
    """The kill switch: no change begins."""


class Staged(Struct, frozen=True):
    """A change begins: it is served in some periods."""

    change: Change
    is_frozen: bool
    """The time is one in which none may begin."""


class Observed(Struct, frozen=True):
    """One more pair has ended."""

    gain: float


class Withdrawn(Struct, frozen=True):
    """A change cannot go on."""

    reason: str


class CarriedOut(Struct, frozen=True):
    """The fleet file is as the verdict says, and served."""


class Stopped(Struct, frozen=True):
    """The kill switch: a change that is tried is taken back, and none begins."""


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
"""The stages that may follow, by stage and event; what is not listed is refused."""


NEW = ("idle", "promoted", "rolled back")
"""The stages in which a change may begin."""


def why_not(state: State, change: Change, limits: Limits, is_frozen: bool) -> str:
    """Why a change may not begin; empty: it may."""
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
    """Why a fleet that may cost so much is not allowed; empty: it is."""
    if limits.max_usd_per_h is None:
        return ""
    if most_usd_per_h is None:
        return "nothing bounds what the fleet may cost: a pool that scales has no max_replicas"
    if most_usd_per_h > limits.max_usd_per_h:
        return f"the fleet may cost ${most_usd_per_h:.2f} an hour, above the ${limits.max_usd_per_h:.2f} allowed"
    return ""


def step(state: State, event: Event, limits: Limits) -> State:
    """The state after an event. HeadwayError, and no other effect, if the event may not happen now."""
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
    """The verdict and its reason after these pairs; None: not known yet."""
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
    """The versions of which one is the fleet file; empty: the autopilot has changed nothing."""
    change = state.change
    if change is None:
        return ()
    if state.stage == "judged" and state.verdict == "promote":
        return change.before, change.version  # whichever was reached when it was interrupted
    return (change.version if state.stage == "promoted" else change.before,)
