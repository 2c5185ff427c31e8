"""A candidate that decides beside the real policies: it changes nothing, whatever it does."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_fakes import Fleet
from fakes import FakeReplica
from headway.control.decisions import Decision, DecisionObserver
from headway.control.policies import Policies
from headway.control.shadow import PACED, Kind, Shadow, ShadowPlan
from headway.core.decision import Placement
from headway.core.record import Ended
from headway.gateway.scheduling import shadows
from headway.policies import ROUTERS
from headway.policies.ordering.fcfs import FcfsOrdering
from headway.policies.routing.round_robin import RoundRobinRouter


class LastRouter:
    """Chooses the last replica that is offered, and notes what it learns."""

    def __init__(self) -> None:
        self.learnt: list[Ended] = []

    def route(self, request: Any, view: Any) -> Placement:
        return Placement(view.replicas[-1].id)

    def learn(self, record: Ended) -> None:
        self.learnt.append(record)


class Hostile:
    """Draws random numbers, changes the list that it is given, chooses what there is not, or raises."""

    def __init__(self) -> None:
        self.num = 0

    def route(self, request: Any, view: Any) -> Placement:
        self.num += 1
        view.random.random()
        if self.num % 3 == 1:
            view.replicas.reverse()
        if self.num % 3 == 2:
            return Placement(99)
        raise RuntimeError("broken")

    def learn(self, record: Ended) -> None:
        raise KeyError(record.id)


class LongestFirst:
    """Ranks the longest prompt first."""

    quantum = None
    preemptive = False

    def rank(self, request: Any, now: float) -> float:
        return -float(request.prompt_tokens)


class HoldsAll:
    interval_s = 1.0

    def holds(self, request: Any) -> bool:
        return True

    def release(self, view: Any) -> list[Any]:
        return []


class Beside:
    """A fleet whose only service a candidate follows, with the candidate's errors and the lines of the log."""

    def __init__(
        self,
        candidate: Any = None,
        /,
        ordering: Any = None,
        admission: Any = None,
        compares_admission: bool = False,
        num: int = 3,
        **fleet: Any,
    ) -> None:
        self.errors: list[tuple[Kind, str]] = []
        self.lines: list[Decision] = []
        observer = DecisionObserver()
        observer.listeners.append(self.lines.append)
        self.fleet = Fleet([FakeReplica(i) for i in range(num)], observer=observer, **fleet)
        self.shadow = Shadow(
            candidate,
            ordering,
            admission,
            compares_admission,
            Random(0),
            lambda kind, what, error: self.errors.append((kind, what or repr(error))),
        )
        self.fleet.service.follow(self.shadow)
        self.fleet.control.note_parts()


def test_both_choices_are_logged_and_counted() -> None:
    beside = Beside(LastRouter())
    for i in range(4):
        beside.fleet.arrive(i)
    assert [(line.choice, line.shadow) for line in beside.lines] == [(0, 2)] * 4
    counts = beside.shadow.counts["routing"]
    assert (counts.agreed, counts.differed, counts.failed, counts.agreement) == (0, 4, 0, 0.0)
    assert beside.shadow.placed == {0: 4} and beside.shadow.chosen == {2: 4}


def test_two_instances_of_a_policy_without_randomness_agree() -> None:
    beside = Beside(RoundRobinRouter(), router=RoundRobinRouter)
    for i in range(7):
        beside.fleet.arrive(i)
    assert beside.shadow.counts["routing"].agreement == 1.0
    assert [choice for _, choice in beside.fleet.effects.started] == [0, 1, 2, 0, 1, 2, 0]


def test_the_candidate_learns_what_really_happened() -> None:
    router = LastRouter()
    beside = Beside(router)
    live = beside.fleet.arrive(0)
    beside.fleet.finish(live, 2.0)
    assert [(each.id, each.replica) for each in router.learnt] == [(0, 0)]
    beside.fleet.service.use(RoundRobinRouter(), FcfsOrdering(), None, None)
    beside.fleet.finish(beside.fleet.arrive(1), 3.0)
    assert len(router.learnt) == 2  # after a change of the real policies, too


@given(st.sampled_from([name for name in ROUTERS if not getattr(ROUTERS[name], "oracle", False)]), st.data())
def test_a_hostile_candidate_changes_no_decision(name: str, data: st.DataObject) -> None:
    """The same arrivals with and without it: the same placements, ends and random numbers."""
    try:
        ROUTERS[name]()
    except TypeError:
        return  # needs arguments
    steps = data.draw(st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=30))

    def run(fleet: Fleet) -> list[tuple[int, int]]:
        lives: list[Any] = []
        for i, (is_end, prompt) in enumerate(steps):
            if is_end and lives:
                fleet.finish(lives.pop(0), float(i))
            else:
                lives.append(fleet.arrive(i, float(i), prompt))
        return fleet.effects.started

    beside = Beside(Hostile(), router=ROUTERS[name])
    plain = Fleet([FakeReplica(i) for i in range(3)], router=ROUTERS[name])
    assert run(beside.fleet) == run(plain)
    assert beside.fleet.service.view.random.getstate() == plain.service.view.random.getstate()
    num = len(beside.fleet.effects.started)
    assert beside.shadow.counts["routing"].failed == num == len([e for e in beside.errors if "learn" not in e[1]])


def test_a_candidate_that_is_paced_decides_about_every_nth_placement() -> None:
    paced: list[int] = []
    beside = Beside(LastRouter())
    beside.shadow._pace = lambda shadow: paced.append(shadow.every) or setattr(shadow, "every", 4)  # type: ignore[func-returns-value]
    for i in range(PACED + 40):
        beside.fleet.arrive(i)
    assert paced == [1] and sum(line.shadow == 2 for line in beside.lines) == (PACED - 1) + 11
    assert beside.shadow.counts["routing"].differed == PACED + 10 == beside.shadow.placed[0]


def test_a_costly_candidate_is_paced_and_a_cheap_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_s = 0.0
    monkeypatch.setattr(shadows, "process_time", lambda: cpu_s)
    policies = Policies(RoundRobinRouter, FcfsOrdering)
    made = shadows.Shadows(ShadowPlan("other", policies, ("routing",)), 0)
    shadow = made.new("m")
    for share, every in ((0.2, 10), (0.02, 10), (0.002, 1), (0.0, 1)):
        cpu_s += 10.0
        shadow.spent_s += 10.0 * share
        made._pace(shadow)
        assert shadow.every == pytest.approx(every, abs=1)


def test_a_candidates_order_of_held_requests_is_compared_when_one_is_placed() -> None:
    beside = Beside(ordering=LongestFirst(), num=1, window=1)
    first = beside.fleet.arrive(0)
    for i, prompt in ((1, 10), (2, 500), (3, 20)):
        beside.fleet.arrive(i, 0.1 * i, prompt)
    beside.fleet.finish(first, 1.0)
    assert [request for request, _ in beside.fleet.effects.started] == [0, 1]  # as it is, by arrival
    assert [(line.what, line.request, line.why) for line in beside.lines if line.what == "shadow"] == [
        ("shadow", "1", "ordering: request 2 goes first")
    ]
    assert beside.shadow.counts["ordering"].differed == 1


@pytest.mark.parametrize("candidate", [HoldsAll(), None])
def test_a_candidates_admission_is_compared_and_holds_nothing(candidate: Any) -> None:
    beside = Beside(admission=candidate, compares_admission=True)
    beside.fleet.arrive(0)
    assert beside.fleet.effects.started == [(0, 0)]
    counts = beside.shadow.counts["admission"]
    assert (counts.agreed, counts.differed) == ((0, 1) if candidate else (1, 0))
    assert [line.why for line in beside.lines if line.what == "shadow"] == (
        ["admission: the request is held"] if candidate else []
    )
