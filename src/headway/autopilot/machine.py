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
from headway.autopilot.staging import OVERDISPERSION, Staging
from headway.core.errors import HeadwayError

Stage = Literal["idle", "staged", "judged", "promoted", "rolled back"]
Verdict = Literal["promote", "roll back"]
ALPHA = 0.05
"""Largest probability that a change without effect is promoted, over all tests of the change."""
HARM = 0.1
"""Loss of SLO attainment in each of the last two pairs that reverts a change at once."""

DELIVERED = 0.5
"""Share of the smallest predicted saving that must be certain."""
MOST_LOST = 0.01
"""Largest loss of SLO attainment, for any saving."""


class Limits(Struct, frozen=True):
    """The changes and the cost that the operator allows."""

    allow: tuple[str, ...]
    max_usd_per_h: float | None
    """Highest cost per hour; None: no bound."""


class Saving(Struct, frozen=True):
    """What a change must deliver that is judged by dollars."""

    predicted: Bounds
    """Predicted saving as a share of today's dollars."""
    most_lost: float
    """Loss of SLO attainment that is accepted."""

    @property
    def least(self) -> float:
        """The share of the dollars that must be saved for certain."""
        return DELIVERED * self.predicted.low


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
    saving: Saving | None = None
    """None: the change is judged by SLO attainment alone."""


class State(Struct, frozen=True):
    stage: Stage = "idle"
    change: Change | None = None
    """The current or last change; None if there was none."""
    gains: tuple[float, ...] = ()
    """SLO attainment with the change minus attainment without it, for each pair so far."""
    savings: tuple[float, ...] = ()
    """Dollars without the change minus dollars with it, as a share of the larger amount, for each pair so far."""
    cautious_gains: tuple[float, ...] = ()
    """`gains` as if a group of requests more had missed its SLOs with the change in each pair. Otherwise a few periods
    without any miss would show that rare misses do not become more frequent."""
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
    saved: float = 0.0
    """As `State.savings`."""
    num_requests: int = 0
    """Requests of the period with fewer of them."""


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
            cautious = event.gain - OVERDISPERSION / event.num_requests if event.num_requests else -1.0
            seen = replace(
                state,
                gains=(*state.gains, event.gain),
                savings=(*state.savings, event.saved),
                cautious_gains=(*state.cautious_gains, cautious),
            )
            verdict, reason = judged(seen)
            stage: Stage = "staged" if verdict is None else "judged"
            return replace(seen, stage=stage, verdict=verdict, reason=reason)
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


def judged(state: State) -> tuple[Verdict | None, str]:
    """The verdict and its reason after the pairs so far; None while undecided."""
    change, gains = state.change, state.gains
    assert change is not None
    if len(gains) >= 2 and max(gains[-2:]) < -HARM:
        return "roll back", f"it loses more than {100 * HARM:.0f} points in two pairs of periods in a row"
    verdict, note = _by_gain(change, gains) if change.saving is None else _by_saving(change.saving, state)
    if verdict is None and len(gains) < change.staging.most_pairs:
        return None, ""
    if verdict is None:
        verdict = "roll back"
        note = f", and no {'gain' if change.saving is None else 'saving at the same SLO attainment'} is certain in time"
    return verdict, f"it {_seen(state)}{note}"


def _by_gain(change: Change, gains: tuple[float, ...]) -> tuple[Verdict | None, str]:
    """The verdict on a change that is to add SLO attainment, and what to say of its prediction."""
    least = max(change.predicted.low, 0.0)
    is_short = is_below(gains, least, ALPHA)
    if is_above(gains, 0.0, ALPHA):
        return "promote", ", less than predicted" if is_short else ""
    if is_short:
        return "roll back", f"; at least {_points(least)} were predicted"
    return None, ""


def _by_saving(saving: Saving, state: State) -> tuple[Verdict | None, str]:
    """The verdict on a change that is to save dollars, and what to say of its prediction."""
    if is_below(state.gains, -saving.most_lost, ALPHA):
        return "roll back", f"; at most {100 * saving.most_lost:.2f} points may be lost for its saving"
    if is_below(state.savings, saving.least, ALPHA):
        return "roll back", f"; at least {saving.predicted.low:.1%} were predicted to be saved"
    is_equal = is_above(state.cautious_gains, -saving.most_lost, ALPHA)
    if is_equal and is_above(state.savings, saving.least, ALPHA):
        is_short = is_below(state.savings, saving.predicted.low, ALPHA)
        return "promote", ", less than predicted" if is_short else ""
    return None, ""


def _seen(state: State) -> str:
    """What the pairs so far say, with bounds."""
    added = bounds(state.gains, ALPHA)
    points = f"{_points(added.low)} to {_points(added.high)} points of SLO attainment"
    saved = ""
    if state.change is not None and state.change.saving is not None:
        found = bounds(state.savings, ALPHA)
        saved = f"saves {found.low:.1%} to {found.high:.1%} of the dollars and "
    return f"{saved}adds {points} in {len(state.gains)} pairs of periods"


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
