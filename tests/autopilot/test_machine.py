"""The autopilot's stages: which follow which, and what never happens, whatever the events."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product, repeat
from random import Random
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.autopilot.evidence import Bounds
from headway.autopilot.machine import (
    ALPHA,
    TRANSITIONS,
    CarriedOut,
    Change,
    Event,
    Limits,
    Observed,
    Resumed,
    Saving,
    Stage,
    Staged,
    State,
    Stopped,
    Withdrawn,
    serving,
    step,
)
from headway.autopilot.staging import OVERDISPERSION, Staging
from headway.core.errors import HeadwayError

LIMITS = Limits(("routing", "ordering"), 40.0)
CHANGE = Change("routing: b", ("routing",), "v0", "v1", Bounds(0.1, 0.3), 30.0, Staging(1.0, 4.0, 10.0, 40))
EVENTS: tuple[Event, ...] = (
    Staged(CHANGE, False),
    Observed(0.0),
    Withdrawn("gone"),
    CarriedOut(),
    Stopped(),
    Resumed(),
)
STAGES: tuple[Stage, ...] = get_args(Stage)


def at(stage: Stage) -> State:
    verdict = {"judged": "promote", "promoted": "promote", "rolled back": "roll back"}.get(stage)
    return State(stage, None if stage == "idle" else CHANGE, verdict=verdict)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "event"), [*product(STAGES, EVENTS)])
def test_what_the_table_lists_is_all_that_happens(stage: Stage, event: Event) -> None:
    before = at(stage)
    allowed = TRANSITIONS.get((stage, type(event)))
    if allowed is None:
        with pytest.raises(HeadwayError, match=f"impossible while a change is {stage}"):
            step(before, event, LIMITS)
    else:
        assert step(before, event, LIMITS).stage in allowed


def test_every_stage_is_listed_with_every_event_that_is_possible_there() -> None:
    possible = {(stage, type(event)) for stage in STAGES for event in EVENTS if _happens(at(stage), event)}
    assert possible == set(TRANSITIONS)
    ends = {("staged", Observed): {"staged", "judged"}, ("judged", CarriedOut): {"promoted", "rolled back"}}
    for key, expected in ends.items():
        assert set(TRANSITIONS[key]) == expected  # type: ignore[index]


def _happens(state: State, event: Event) -> bool:
    try:
        step(state, event, LIMITS)
    except HeadwayError:
        return False
    return True


def test_a_verdict_is_carried_out_as_it_is() -> None:
    for verdict, stage, version in (("promote", "promoted", "v1"), ("roll back", "rolled back", "v0")):
        state = step(replace(at("judged"), verdict=verdict), CarriedOut(), LIMITS)
        assert state.stage == stage and serving(state) == (version,)


@pytest.mark.parametrize(
    ("change", "is_frozen", "is_stopped", "why"),
    [
        (replace(CHANGE, most_usd_per_h=40.01), False, False, r"may cost \$40\.01 an hour, above the \$40\.00"),
        (replace(CHANGE, kinds=("routing", "replicas")), False, False, "not among the allowed kinds: replicas"),
        (CHANGE, True, False, "freeze window"),
        (CHANGE, False, True, "the autopilot is stopped"),
    ],
)
def test_a_change_beyond_the_limits_does_not_begin(change: Change, is_frozen: bool, is_stopped: bool, why: str) -> None:
    with pytest.raises(HeadwayError, match=why):
        step(State(is_stopped=is_stopped), Staged(change, is_frozen), LIMITS)


_CHANGES = st.builds(
    lambda num, kinds, usd: replace(CHANGE, name=f"c{num}", version=f"v{num}", kinds=kinds, most_usd_per_h=usd),
    st.integers(1, 9),
    st.sampled_from([("routing",), ("ordering",), ("replicas",)]),
    st.floats(0, 80),
)
_WALKS = st.lists(
    st.one_of(
        st.builds(Staged, _CHANGES, st.booleans()),
        st.builds(Observed, st.floats(-1, 1)),
        st.sampled_from([Observed(0.5), CarriedOut(), CarriedOut(), Withdrawn("gone"), Stopped(), Resumed()]),
    ),
    max_size=60,
)


@given(_WALKS)
def test_random_walks_never_try_two_changes_or_go_beyond_the_limits(events: list[Event]) -> None:
    state, running = State(), "v0"
    for event in events:
        if isinstance(event, Staged):
            event = replace(event, change=replace(event.change, before=running))
        before = state
        try:
            state = step(state, event, LIMITS)
        except HeadwayError:
            assert state is before
            continue
        if state.stage == "staged" and before.stage != "staged":
            assert isinstance(event, Staged) and before.stage != "judged" and not before.is_stopped
            assert not event.is_frozen and state.gains == ()
        if before.stage in ("staged", "judged"):
            assert state.change is before.change  # until it is over, no other
        if state.change is not None:
            assert state.change.most_usd_per_h <= 40 and set(state.change.kinds) <= set(LIMITS.allow)
            assert running in serving(state) or isinstance(event, CarriedOut)
        if isinstance(event, CarriedOut):
            (running,) = serving(state)
            assert (running == before.change.version) == (before.verdict == "promote")  # type: ignore[union-attr]
        assert (state.verdict is None) == (state.stage in ("idle", "staged"))


# Verdicts.


def verdict_of(gains: Any, most_pairs: int = 40, predicted: Bounds = CHANGE.predicted) -> State:
    """The state once a change is judged, of which each pair shows the next gain."""
    change = replace(CHANGE, predicted=predicted, staging=replace(CHANGE.staging, most_pairs=most_pairs))
    state = step(State(), Staged(change, False), LIMITS)
    while state.stage == "staged":
        state = step(state, Observed(max(-1.0, min(next(gains), 1.0))), LIMITS)
    return state


def share_promoted(effect: float, deviation: float, num: int) -> float:
    """Of runs with this effect: the share that is promoted."""
    random = Random(7)
    runs = [verdict_of(iter(lambda: random.gauss(effect, deviation), None)) for _ in range(num)]
    return sum(run.verdict == "promote" for run in runs) / num


def test_a_change_without_effect_is_promoted_in_at_most_alpha_of_all_orders_of_its_periods() -> None:
    sizes = [0.05 + 0.02 * (i % 3) for i in range(7)]
    found = [
        verdict_of(iter([s * d for s, d in zip(signs, sizes, strict=True)]), len(sizes), Bounds(0.0, 0.1)).verdict
        for signs in product((1, -1), repeat=len(sizes))
    ]
    assert set(found) == {"promote", "roll back"} and found.count("promote") / len(found) <= ALPHA


def test_a_change_that_is_worse_by_20_points_is_rolled_back_and_one_that_is_better_is_promoted() -> None:
    assert share_promoted(-0.2, 0.1, 40) == 0
    assert share_promoted(0.2, 0.1, 40) >= 0.95


def test_reasons_say_what_was_seen_and_what_was_predicted() -> None:
    worse = verdict_of(iter([-0.15, -0.2]))
    assert (worse.verdict, worse.reason) == (
        "roll back",
        "it loses more than 10 points in two pairs of periods in a row",
    )
    less = verdict_of(iter([0.01, -0.01] * 40), predicted=Bounds(0.3, 0.4))
    assert less.verdict == "roll back" and less.reason.endswith("; at least +30.0 were predicted")
    weak = verdict_of(iter([0.06] * 40), predicted=Bounds(0.3, 0.4))
    assert weak.verdict in ("promote", "roll back") and "pairs of periods" in weak.reason
    unknown = verdict_of(iter([0.05, 0.06, -0.04] * 5), most_pairs=4)
    assert unknown.reason.endswith("in 4 pairs of periods, and no gain is certain in time")


# A change that is to save dollars.

SAVING = Saving(Bounds(0.2, 0.3), most_lost=0.01)


def by_dollars(gains: Any, savings: Any, num_requests: int = 800, most_pairs: int = 60) -> State:
    """The state once a change that promises `SAVING` is judged, of which each pair shows the next gain and saving."""
    change = replace(CHANGE, saving=SAVING, staging=replace(CHANGE.staging, most_pairs=most_pairs))
    state = step(State(), Staged(change, False), LIMITS)
    while state.stage == "staged":
        state = step(state, Observed(next(gains), next(savings), num_requests), LIMITS)
    return state


@pytest.mark.parametrize(
    ("gain", "saved", "verdict", "why"),
    [
        (0.0, 0.25, "promote", r"it saves \d+\.\d% to \d+\.\d% of the dollars and adds -\d\.\d to \+\d\.\d points"),
        (0.05, 0.15, "promote", "of periods, less than predicted$"),
        (-0.04, 0.25, "roll back", r"at most 1\.00 points may be lost for its saving$"),
        (0.0, 0.02, "roll back", r"at least 20\.0% were predicted to be saved$"),
        (0.05, -0.2, "roll back", "were predicted to be saved$"),
        (-0.009, 0.25, "roll back", "no saving at the same SLO attainment is certain in time$"),
        (0.0, 0.1, "roll back", "no saving at the same SLO attainment is certain in time$|to be saved$"),
    ],
    ids=["as promised", "less", "worse for clients", "saves little", "dearer", "nearly too much lost", "half"],
)
def test_a_saving_is_kept_at_the_same_attainment_alone(gain: float, saved: float, verdict: str, why: str) -> None:
    random = Random(3)
    gains, savings = (iter([random.gauss(mean, 0.004) for _ in range(60)]) for mean in (gain, saved))
    state = by_dollars(gains, savings)
    assert state.verdict == verdict and re.search(why, state.reason), state.reason


@pytest.mark.parametrize("base", [0.0, 0.003])
@pytest.mark.parametrize("num", [50, 100])
def test_rare_misses_that_no_period_shows_by_luck_are_not_taken_for_none(num: int, base: float) -> None:
    """A change that loses more than is accepted, in groups of `OVERDISPERSION` requests that wait together."""
    random = np.random.default_rng(1)

    def attainments(missed: float) -> Iterator[float]:
        groups = random.poisson(num * missed / OVERDISPERSION, 60)
        return iter(np.maximum(1 - OVERDISPERSION * groups / num, 0.0).tolist())

    found = []
    for _ in range(30):
        pairs = zip(attainments(base + SAVING.most_lost), attainments(base), strict=True)
        found.append(by_dollars((after - before for after, before in pairs), repeat(0.25), num, 30).verdict)
    assert found.count("promote") / len(found) <= ALPHA


def test_a_state_of_before_changes_were_judged_by_dollars_is_read() -> None:
    state = replace(at("staged"), gains=(0.1,))
    stored = msgspec.to_builtins(state)
    for key in ("savings", "cautious_gains"):
        del stored[key]
    del stored["change"]["saving"]
    assert msgspec.convert(stored, State) == state
