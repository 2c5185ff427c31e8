"""The least score found by bounds against a scan: of any numbers, and of the routers that use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headway.control import observe
from headway.control.changes import Changes
from headway.control.observe import MutableFleetView
from headway.control.search import Search
from headway.core.decision import Placement
from headway.core.policy import Router
from headway.core.record import Ended, Outcome
from headway.core.view import Bounds, FleetView, RequestView, UnkeptValues
from headway.policies.routing.dynamo_cost import DynamoCostRouter
from headway.policies.routing.freest import FreestRouter
from headway.policies.routing.headway import HeadwayRouter
from headway.policies.routing.headway_load import SHORT
from headway.policies.routing.infaas import InfaasRouter
from headway.policies.routing.jsq_tokens import JsqTokensRouter
from headway.policies.routing.kv import PascalRouter
from headway.policies.routing.llm_d_scorers import LlmDScorersRouter
from headway.policies.routing.lmetric import LmetricRouter
from headway.policies.routing.remaining_work import RemainingWorkOracleRouter, RemainingWorkRouter
from simulation import Made, Restless, Scenario, num_examples, play, pool, request, scenarios, sloped


@dataclass
class Scored:
    """A replica with numbers, and what its score is beyond them."""

    id: int
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    kind: int | None = None
    beyond: int = 0
    holds_until_s: float = 0.0
    ends_s: float = inf
    """When the numbers change by themselves."""

    def bounds(self) -> Bounds:
        first, second, third, fourth = map(float, self.numbers)
        self.holds_until_s = min(self.holds_until_s, self.ends_s)
        return first, second, third, fourth, None if self.kind is None else (self.numbers, self.beyond, self.kind)


UPDATES = st.tuples(st.integers(0, 6), st.integers(0, 1 << 32))
WEIGHTS = st.tuples(*3 * [st.sampled_from([0.0, 1.0, 2.5])])
TICKS = st.tuples(st.integers(0, 6), st.integers(0, 1), st.integers(0, 2), st.booleans())
"""(replica, increase of its first number, increase of its score beyond, whether both fall instead if they may)."""
STEPS = st.tuples(
    st.lists(UPDATES, max_size=4),
    st.lists(TICKS, max_size=6),
    WEIGHTS,
    st.sampled_from(["", "", "", "", "list", "limit"]),
)


def scored(id: int, seed: int) -> Scored:
    """Small numbers, so that ties and equal bounds are frequent; scores are often beyond the bounds."""
    random = Random(seed)
    one, two, three, four = (random.randrange(4) for _ in range(4))
    return Scored(id, (one, two, three, four), random.choice([None, 1, 2]), random.choice([0, 0, 1, 4]))


def next_tick(steps: list[Any], number: int, id: int) -> float:
    """The next step after `number` in which a replica ticks."""
    later = (i for i in range(number + 1, len(steps)) if any(tick[0] == id for tick in steps[i][1]))
    return next(later, inf)


@settings(max_examples=num_examples(100), derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=30), st.booleans())
def test_the_least_score_is_that_of_a_scan(steps: list[Any], falls: bool) -> None:
    """Of replicas that change, alone and in kinds, with notes and by ticks (which may lower scores, or not), in lists
    that are replaced; ties too."""
    changes = Changes()
    everyone = [scored(id, id) for id in range(7)]
    search = Search(Scored.bounds, changes, falls)
    replicas: Any = everyone
    last = None
    for now, (updates, ticks, weights, event) in enumerate(steps):
        for id, grown, further, falls_now in ticks:
            one, sign = everyone[id], -1 if falls and falls_now else 1
            one.numbers, one.beyond = (
                (one.numbers[0] + sign * grown, *one.numbers[1:]),
                max(one.beyond + sign * further, 0),
            )
        for id, seed in updates:
            one, new = everyone[id], scored(id, seed)
            one.numbers, one.kind, one.beyond = new.numbers, new.kind, new.beyond
            changes.ids.append(id)
        if event == "limit":
            changes.ids.extend([0] * 20_000)
            changes.limit()
        if event == "list":
            replicas = everyone[len(updates) :]

        def score(one: Any, weights: tuple[float, ...] = weights) -> float:
            first, *others = one.numbers
            return one.beyond + first + sum(number * weight for number, weight in zip(others, weights, strict=True))

        for one in everyone:
            one.ends_s = next_tick(steps, now, one.id)
        at = search.least(replicas, weights, score, now)
        expected = min(range(len(replicas)), key=lambda i: (score(replicas[i]), replicas[i].id))
        assert at == (expected if replicas is last else -1)
        last = replicas


def test_of_replicas_that_tick_alike_few_are_read() -> None:
    """Each replica leaves its kind at another tick: only the replica that stands for a kind is read."""
    changes = Changes()
    replicas: Any = [Scored(id, (id % 2, 0, 0, 0), 1) for id in range(1000)]
    read: list[int] = []

    def score(one: Any) -> float:
        read.append(one.id)
        return float(one.numbers[0])

    search = Search(Scored.bounds, changes)
    search.least(replicas, (0.0, 0.0, 0.0), score, 0.0)
    for id in range(0, 1000, 2):
        assert search.least(replicas, (0.0, 0.0, 0.0), score, 0.0) == id
        replicas[id].numbers = (2, 0, 0, 0)
    assert search.least(replicas, (0.0, 0.0, 0.0), score, 0.0) == 1
    assert len(read) <= 501


def test_few_replicas_are_read() -> None:
    """Of a thousand of a kind the first; of a thousand with other numbers those that may be the least."""
    changes, random = Changes(), Random(0)
    replicas: Any = [Scored(id, (5, 0, 0, 0), 1) for id in range(1000)]
    replicas += [Scored(1000 + id, (random.randrange(6, 1000), 0, 0, 0)) for id in range(1000)]
    read: list[int] = []

    def score(one: Any) -> float:
        read.append(one.id)
        return float(one.numbers[0])

    search = Search(Scored.bounds, changes)
    search.least(replicas, (0.0, 0.0, 0.0), score, 0.0)
    assert search.least(replicas, (0.0, 0.0, 0.0), score, 0.0) == 0
    assert read == [0]
    replicas[0].kind, replicas[0].numbers = None, (7, 0, 0, 0)
    changes.ids.append(0)
    assert search.least(replicas, (0.0, 0.0, 0.0), score, 0.0) == 1
    assert read == [0, 1]


class All(UnkeptValues):
    """A view whose replicas are all read."""

    def __init__(self, view: FleetView) -> None:
        self.now, self.random, self.replicas, self.wants_scores = view.now, copy(view.random), view.replicas, False


class Noted:
    """A view that notes the replicas that are found without reading all."""

    def __init__(self, view: FleetView, found: list[int]) -> None:
        self._view, self._found = view, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def _note(self, one: Any) -> Any:
        if one is not None:
            self._found.append(one.id)
        return one

    def find_least(self, key: Callable[[Any], Any], grows: bool = False) -> Any:
        return self._note(self._view.find_least(key, grows))

    def find_least_score(self, *arguments: Any, **named: Any) -> Any:
        return self._note(self._view.find_least_score(*arguments, **named))


class Checked(Noted):
    """A view that holds the bounds of each replica to its score. The router thereby knows the score of each replica
    before it searches. `HeadwayRouter` does not rely on all bounds: it reads replicas apart that run faster than
    expected, and reads all if a prompt that was short turns out to be long for a replica that it had not seen."""

    def __init__(self, view: FleetView, router: Any) -> None:
        super().__init__(view, [])
        self.random, self._router = copy(view.random), router

    def _relies_on(self, bounds: Callable[[Any], Bounds], prompt_tokens: float, replica: int) -> bool:
        router = self._router
        if not isinstance(router, HeadwayRouter):
            return True
        if bounds == router._bounds_if_short and SHORT * prompt_tokens > router._least_capacity_tokens:
            return False
        return router._states[replica].observed.factor >= 1 or replica not in router._off

    def find_least(self, key: Callable[[Any], Any], grows: bool = False) -> Any:
        one = super().find_least(key, grows)
        assert one is None or one is min(self._view.replicas, key=key)
        return one

    def find_least_score(  # type: ignore[override]
        self,
        bounds: Callable[[Any], Bounds],
        weights: tuple[float, float, float],
        score: Callable[[Any], float],
        falls: bool = False,
    ) -> Any:
        of_kinds: dict[Any, tuple[float, ...]] = {}
        for replica in self._view.replicas:
            first, *others, kind = bounds(replica)
            least = first + sum(number * weight for number, weight in zip(others, weights, strict=True))
            own = score(replica)
            if self._relies_on(bounds, weights[0], replica.id):
                assert least <= own * (1 + 1e-9)
                equal = own, first, *others
                assert kind is None or of_kinds.setdefault(kind, equal) == equal
        return super().find_least_score(bounds, weights, score, falls)


class Twins:
    """A router that finds the least score beside one that reads all replicas, and one whose bounds are checked."""

    checks_bounds = True

    def __init__(self, make: Callable[[], Any]) -> None:
        self._routers = [make() for _ in range(3 if self.checks_bounds else 2)]
        self.found: list[int] = []

    def route(self, request: RequestView, view: FleetView) -> Placement:
        view.wants_scores = False  # type: ignore[misc]
        views: list[Any] = [Noted(view, self.found), All(view), Checked(view, self._routers[-1])]
        found, *others = (router.route(request, each) for router, each in zip(self._routers, views, strict=False))
        for other in others:
            assert (found.replica, found.decode) == (other.replica, other.decode)
        return Placement(found.replica, found.decode)

    def learn(self, record: Ended) -> None:
        for each in self._routers:
            if hasattr(each, "learn"):
                each.learn(record)


def twins(make: Callable[[], Any], pairs: bool) -> Callable[[], Router]:
    class Made(Twins):
        def __init__(self) -> None:
            super().__init__(make)

    Made.pairs = pairs  # type: ignore[attr-defined]
    return Made


ROUTERS = {
    "headway": (HeadwayRouter, True),
    "lmetric": (LmetricRouter, False),
    "dynamo-cost": (DynamoCostRouter, False),
    "weighted": (lambda: DynamoCostRouter(overlap_weight=0.3), False),
    "freest": (FreestRouter, False),
    "pascal": (PascalRouter, False),
    "infaas": (InfaasRouter, False),
    "slow": (lambda: InfaasRouter(gamma=3.0, overload_share=0.01, interference_factor=1.02), False),
    "jsq-tokens": (JsqTokensRouter, False),
    "short": (lambda: JsqTokensRouter(prior_output_tokens=2.0), False),
    "remaining-work": (RemainingWorkRouter, False),
    "remaining-work-oracle": (RemainingWorkOracleRouter, False),
}
KEEPING = {
    "llm-d-scorers": (LlmDScorersRouter, False),
    "limited": (lambda: LlmDScorersRouter(max_waiting=2, max_kv=0.6), False),
}
"""Routers that keep the values of all replicas."""


@settings(
    max_examples=num_examples(40),
    derandomize="HEADWAY_FUZZ_EXAMPLES" not in os.environ,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(scenarios(), st.sampled_from(sorted(ROUTERS | KEEPING)))
def test_routers_choose_as_if_they_read_all(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, name: str) -> None:
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    replace(scenario, router=twins(*(ROUTERS | KEEPING)[name])).play()


def test_replicas_that_are_nearly_full_are_of_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests wait for a batch slot or KV blocks, equal counts have other scores (`Checked`)."""
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    random, arrival_s, requests = Random(3), 0.0, []
    for id in range(200):
        arrival_s += random.expovariate(40)
        requests.append(request(id, arrival_s, random.choice((16, 64)), random.choice((20, 60, 100))))
    for small in ({"kv_capacity_tokens": 320}, {"max_num_seqs": 2}):
        play(requests, pool(replicas=6, **small), router=twins(HeadwayRouter, True), line=None)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_routers_find_most_replicas_by_bounds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Where no request makes a router read all; the bounds of each replica are at most its scores."""
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    make, pairs = ROUTERS[name]
    made: list[Any] = []

    def kept() -> Any:
        made.append(twins(make, pairs)())
        return made[-1]

    kept.pairs = pairs  # type: ignore[attr-defined]
    random, arrival_s = Random(2), 0.0
    requests = []
    for id in range(200):
        arrival_s += random.expovariate(20)
        requests.append(
            request(id, arrival_s, int(random.lognormvariate(5, 1)) + 1, int(random.lognormvariate(4, 1)) + 1)
        )
    play(requests, pool(replicas=5), pool(name="other", replicas=3), router=kept, line=None)
    assert len(made[0].found) > 150 and len(set(made[0].found)) == 8


@pytest.mark.parametrize("seed", range(40))
def test_headway_chooses_as_if_it_read_all_while_requests_move(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A request that ends elsewhere lowers the score of the replica where it was placed."""
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    monkeypatch.setattr(Twins, "checks_bounds", False)
    random, arrival_s, requests = Random(seed), 0.0, []
    replicas, longest = random.choice((5, 12, 25)), random.choice((16, 64, 200))
    rate = random.choice((20, 60, 200)) * replicas / 8
    for id in range(random.choice((80, 160, 250))):
        arrival_s += random.expovariate(rate)
        requests.append(request(id, arrival_s, random.choice((1, 16, longest)), random.choice((1, 2, 20, 60, 200))))
    seats, kv_tokens = random.choice((2, 4, 16, 64)), random.choice((1500, 4000, 20_000))
    pools = pool(replicas=replicas, max_num_seqs=seats, kv_capacity_tokens=kv_tokens)
    migration = Made(Restless, random.choice(((0.05, 3, 0.5), (0.05, 50, 0.05))))
    play(requests, pools, router=twins(HeadwayRouter, True), line=sloped, migration=migration, seed=seed)


@dataclass
class Counted:
    """A replica of counts, as routers that count tokens read it."""

    id: int
    num_in_flight: int
    tokens_generated: int
    prefill_tokens_left: int = 0
    expected_cached_tokens: int = 0
    kv_blocks_total: int = 1000
    goodput_rps: float = 0.0
    holds_until_s: float = inf

    def cached_tokens(self, request: RequestView) -> int:
        return 0


@pytest.mark.parametrize("make", [JsqTokensRouter, RemainingWorkRouter])
def test_what_a_router_learns_does_not_leave_unlike_replicas_in_one_kind(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any]
) -> None:
    """All requests have more tokens than the mean, so that only their number counts, until the mean has grown."""
    monkeypatch.setattr(observe, "KEPT_FROM", 1)
    router = make(prior_output_tokens=2.0)
    view = MutableFleetView(Random(0), wants_scores=False)
    view.changes, view.replicas = Changes(), cast("Any", [Counted(0, 1, 10), Counted(1, 1, 50), Counted(2, 3, 90)])
    asked = cast("RequestView", Asked())
    for _ in range(3):
        assert router.route(asked, view).replica == 0
    for _ in range(200):
        router.learn(cast("Ended", Finished()))
    assert router.route(asked, view).replica == 1, "the one that has generated more has less left"


@dataclass
class Asked:
    prompt_tokens: int = 10
    generated_tokens: int = 0
    prefix: tuple[()] = ()


@dataclass
class Finished:
    generated_tokens: int = 100
    outcome: Outcome = Outcome.FINISHED
