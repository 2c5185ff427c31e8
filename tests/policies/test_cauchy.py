"""Cauchy's router on fleets made by hand: whose turn it is between combos, and who does what within one."""

from __future__ import annotations

import pickle
from collections import Counter
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeFleet, FakeReplica, FakeRequest
from headway.core.decision import Placement
from headway.core.errors import HeadwayError
from headway.policies import resolve
from headway.policies.routing.cauchy import CauchyRouter
from headway.policies.routing.combos import WeightedRoundRobin
from headway.policies.workload_class import WorkloadClass


def combo(number: int, num_prefill: int, num_decode: int, goodput_rps: float | None = None) -> list[FakeReplica]:
    """Combo 2 of 1P2D has the replicas 20, 21 and 22."""
    roles = ["prefill"] * num_prefill + ["decode"] * num_decode
    return [
        FakeReplica(10 * number + i, role=role, combo=number, goodput_rps=goodput_rps, pool=f"c{number}-{role}")
        for i, role in enumerate(roles)
    ]


def plain(number: int, **given: Any) -> FakeReplica:
    return FakeReplica(10 * number, combo=number, pool=f"p{number}", **given)


def chosen(router: CauchyRouter, replicas: list[FakeReplica], times: int = 1) -> Counter[int]:
    """How often each combo is chosen."""
    combos = {replica.id: replica.combo for replica in replicas}
    placements = [router.route(FakeRequest(i), FakeFleet(replicas)) for i in range(times)]
    return Counter(combos[placement.replica] for placement in placements)


# Between combos.


@settings(deadline=None)
@given(
    goodputs=st.lists(st.one_of(st.floats(0.05, 50), st.integers(1, 6).map(float)), min_size=1, max_size=8),
    num=st.integers(1, 300),
)
def test_turns_are_proportional_to_within_one_at_every_instant(goodputs: list[float], num: int) -> None:
    turns, total = WeightedRoundRobin(), sum(goodputs)
    weights = {i: goodput / total for i, goodput in enumerate(goodputs)}
    had: Counter[int] = Counter()
    for n in range(1, num + 1):
        had[turns.next(weights)] += 1
        assert all(abs(had[i] - n * weight) < 1 + 1e-6 for i, weight in weights.items())


def test_equal_weights_are_plain_round_robin() -> None:
    turns = WeightedRoundRobin()
    assert [turns.next(dict.fromkeys((3, 5, 8), 1 / 3)) for _ in range(7)] == [3, 5, 8, 3, 5, 8, 3]


def test_turns_of_a_heavy_one_are_spread() -> None:
    turns = WeightedRoundRobin()
    order = [turns.next({0: 0.5, 1: 0.25, 2: 0.25}) for _ in range(8)]
    assert order[0::2] == [0, 0, 0, 0] and sorted(order[1::2]) == [1, 1, 2, 2]


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_weights_follow_combos_that_come_and_go(seed: int) -> None:
    """Within each stretch between changes, counts are proportional to the goodputs of those that are there."""
    rng, router = Random(seed), CauchyRouter()
    kinds = {number: combo(number, 1, 1, rng.choice((0.5, 2.14, 3.2, 8.0))) for number in range(6)}
    for _ in range(6):
        there = rng.sample(sorted(kinds), rng.randint(1, 6))
        replicas = [replica for number in there for replica in kinds[number]]
        total = sum(kinds[number][0].goodput_rps or 0 for number in there)
        had = chosen(router, replicas, num := rng.randint(1, 60))
        for number in there:
            due = num * (kinds[number][0].goodput_rps or 0) / total
            assert abs(had[number] - due) < 2.5, "one turn owed before and one owed after, and those of who went"


def test_goodput_weighs_combos_and_a_combo_without_a_profile_as_the_mean() -> None:
    replicas = [*combo(1, 1, 1, 6.0), *combo(2, 1, 2, 2.0), *combo(3, 1, 1, None), plain(4, goodput_rps=0.0)]
    assert chosen(CauchyRouter(), replicas, 160) == {1: 60, 2: 20, 3: 40, 4: 40}


def test_without_any_profile_all_weigh_the_same() -> None:
    assert chosen(CauchyRouter(), [*combo(1, 1, 3), *combo(2, 2, 1), plain(3)], 30) == {1: 10, 2: 10, 3: 10}


@pytest.mark.parametrize("between", ["goodput", "round-robin"])
def test_turns_of_a_combo_that_was_alone_leave_no_credit(between: Literal["goodput", "round-robin"]) -> None:
    both = [*combo(1, 1, 1, 6.0), *combo(2, 1, 1, 2.0)]
    router, fresh = CauchyRouter(between), CauchyRouter(between)
    assert chosen(router, both[:2], 5) == {1: 5}
    turns = [[each.route(FakeRequest(), FakeFleet(both)) for _ in range(9)] for each in (router, fresh)]
    assert turns[0] == turns[1]


@pytest.mark.parametrize("seed", range(5))
def test_the_only_combo_is_served_as_one_of_several(seed: int) -> None:
    """A router that has had other combos counts turns; one that has not skips them."""
    rng, counting, fresh = Random(seed), CauchyRouter(), CauchyRouter()
    counting.route(FakeRequest(), FakeFleet([*combo(2, 1, 1), *combo(3, 1, 1)]))
    only = combo(1, 2, 3)
    for _ in range(40):
        for each in only:
            each.num_in_flight, each.num_waiting = rng.randint(0, 3), rng.randint(0, 1)
            each.prefill_tokens_left = rng.choice([0, 0, 500])
        assert counting.route(FakeRequest(), FakeFleet(only)) == fresh.route(FakeRequest(), FakeFleet(only))


def test_round_robin_ignores_goodput() -> None:
    replicas = [*combo(1, 1, 1, 6.0), *combo(2, 1, 1, 2.0)]
    assert chosen(CauchyRouter(between="round-robin"), replicas, 10) == {1: 5, 2: 5}


def test_tokens_takes_the_combo_with_most_room_less_prompts_to_come() -> None:
    small, large = combo(1, 1, 1), combo(2, 1, 1)
    large[1].kv_blocks_total = 2000
    router = CauchyRouter(between="tokens")
    assert chosen(router, [*small, *large]) == {2: 1}
    large[1].kv_blocks_used = 1001
    assert chosen(router, [*small, *large]) == {1: 1}
    small[0].prefill_tokens_left = 17  # the other has 16 tokens less
    assert chosen(router, [*small, *large]) == {2: 1}


def test_a_combo_that_cannot_prefill_now_stands_back() -> None:
    replicas = [combo(1, 1, 1)[1], *combo(2, 1, 1)]
    assert chosen(CauchyRouter(), replicas, 4) == {2: 4}
    assert CauchyRouter().route(FakeRequest(), FakeFleet(replicas[:1])) == Placement(11)


# Within a combo.


def test_figure_5b() -> None:
    """1P2D: the first to prefill 0, the second and third in place on the idle decode instances, ..."""
    router, replicas = CauchyRouter(), combo(1, 1, 2)
    prefill, decode_0, decode_1 = replicas
    view = FakeFleet(replicas)
    first = router.route(FakeRequest(0), view)
    assert first == Placement(prefill.id, decode_0.id)
    prefill.num_in_flight, prefill.prefill_tokens_left = 1, 100
    in_place = [router.route(FakeRequest(1), view)]
    decode_1.num_in_flight = 1
    in_place.append(router.route(FakeRequest(2), view))
    decode_0.num_in_flight = 1
    assert in_place == [Placement(decode_1.id), Placement(decode_0.id)]
    # The first is handed over to decode 0; prefill 0, idle again beside busy decode instances, has the fourth.
    prefill.num_in_flight, prefill.prefill_tokens_left, decode_0.num_in_flight = 0, 0, 2
    assert router.route(FakeRequest(3), view) == Placement(prefill.id)
    # All are busy: prefill there, decode where the fewest are.
    prefill.num_in_flight = 1
    assert router.route(FakeRequest(4), view) == Placement(prefill.id, decode_1.id)


def test_least_pending_prefill_and_least_loaded_decode_when_all_are_busy() -> None:
    replicas = combo(1, 2, 2)
    for replica, in_flight, pending in zip(replicas, (3, 5, 9, 8), (700, 600, 0, 0), strict=True):
        replica.num_in_flight, replica.prefill_tokens_left = in_flight, pending
    assert CauchyRouter().route(FakeRequest(), FakeFleet(replicas)) == Placement(11, 13)


def test_who_is_being_prefilled_counts_where_it_will_decode() -> None:
    router, replicas = CauchyRouter(), combo(1, 1, 3)
    for replica in replicas:
        replica.num_in_flight = 4
    view, targets = FakeFleet(replicas), []
    for i in range(6):
        targets.append(router.route(FakeRequest(i), view).decode)
        replicas[0].num_in_flight += 1
    assert targets == [11, 12, 13, 11, 12, 13]
    replicas[0].num_in_flight = 0  # all are handed over, to whoever took them
    replicas[1].num_in_flight = 10
    replicas[0].num_in_flight, replicas[0].prefill_tokens_left = 1, 100
    assert router.route(FakeRequest(), view).decode == 12


class ByWholeRanks:
    """The choice within a combo, with every number of every replica."""

    def __init__(self, in_place: float) -> None:
        self.in_place = in_place
        self.sent: dict[int, list[int]] = {}

    def choose(self, combo: list[FakeReplica]) -> Placement:
        load = {each.id: max(each.num_in_flight, each.num_waiting + each.num_running) for each in combo}
        able = [each for each in combo if each.role != "decode"] or combo
        decode = [each for each in combo if each.role != "prefill"]
        first = min(able, key=lambda each: (load[each.id] > 0, each.prefill_tokens_left, load[each.id], each.id))
        if not decode:
            return Placement(first.id)
        for each in combo:
            targets = self.sent.setdefault(each.id, [])
            del targets[: max(len(targets) - each.num_in_flight, 0)]
        coming = Counter(target for each in combo for target in self.sent[each.id])
        last = min(decode, key=lambda each: (load[each.id] > 0, load[each.id] + coming[each.id], each.id))
        if load[first.id] and not load[last.id]:
            return Placement(last.id)
        has_room = load[last.id] > 0
        if load[first.id]:
            is_computing = first.prefill_tokens_left > 0 or first.num_waiting > 0
            has_room = not is_computing and load[first.id] < self.in_place * load[last.id]
        if first.role != "prefill" or has_room:
            return Placement(first.id)
        self.sent[first.id].append(last.id)
        return Placement(first.id, last.id)


@settings(deadline=None)
@given(
    roles=st.lists(st.sampled_from(["prefill", "prefill", "decode", "decode", "mixed"]), min_size=1, max_size=6),
    in_place=st.sampled_from([0.0, 0.5, 1.0]),
    random=st.randoms(use_true_random=False),
)
def test_the_choice_within_a_combo_is_that_by_whole_ranks(roles: list[str], in_place: float, random: Random) -> None:
    """Also with metrics that lag behind or count others' requests, ids in any order, and roles that change."""
    replicas = [FakeReplica(id, role=role) for id, role in zip(random.sample(range(9), len(roles)), roles, strict=True)]
    router, oracle = CauchyRouter(in_place=in_place), ByWholeRanks(in_place)
    for i in range(40):
        each = random.choice(replicas)
        each.num_in_flight = random.choice([0, 1, each.num_in_flight + 1, 7])
        each.num_waiting, each.num_running = random.choice([0, 0, 2]), random.choice([0, each.num_in_flight, 3])
        each.prefill_tokens_left = random.choice([0, 0, 100, 100 * each.num_in_flight])
        if i % 9 == 8:
            each.role = random.choice(["prefill", "decode", "mixed"])
        assert router.route(FakeRequest(i), FakeFleet(replicas)) == oracle.choose(replicas)


def test_strict_is_prefill_then_decode_each_in_turn() -> None:
    router, view = CauchyRouter(within="strict"), FakeFleet(combo(1, 2, 3))
    placements = [router.route(FakeRequest(i), view) for i in range(6)]
    assert placements == [Placement(p, d) for p, d in ((10, 12), (11, 13), (10, 14), (11, 12), (10, 13), (11, 14))]


@pytest.mark.parametrize("within", ["opportunistic", "strict"])
def test_who_does_both_keeps_what_it_is_given(within: Any) -> None:
    """Replicas of their own, and those that cover for others of their combo."""
    covering = combo(1, 1, 1)[:1]
    covering[0].role = "mixed"
    for replicas in ([plain(3)], covering):
        assert CauchyRouter(within=within).route(FakeRequest(), FakeFleet(replicas)) == Placement(replicas[0].id)


def test_a_covering_combo_spreads_over_those_that_do_both() -> None:
    replicas = combo(1, 0, 2)
    for replica in replicas:
        replica.role, replica.num_in_flight = "mixed", replica.id
    assert CauchyRouter().route(FakeRequest(), FakeFleet(replicas)) == Placement(10)


# Classes.

CLASSES = (WorkloadClass(("c1",), min_prompt_tokens=1000), WorkloadClass(("p2", "c3"), tiers=(2, 3)))


def test_classes_have_their_combos_to_themselves() -> None:
    replicas = [*combo(1, 1, 1), plain(2), *combo(3, 1, 1), *combo(4, 1, 1)]
    router = CauchyRouter(classes=CLASSES)

    def goes(**given: Any) -> set[int]:
        found = [router.route(FakeRequest(i, **given), FakeFleet(replicas)).replica // 10 for i in range(6)]
        return set(found)

    assert goes(prompt_tokens=1000, tier=2) == {1}, "the first class that has it"
    assert goes(prompt_tokens=999, tier=2) == {2, 3}
    assert goes(prompt_tokens=999, tier=0) == {4}
    del replicas[:2]
    assert goes(prompt_tokens=1000) == {2, 3, 4}, "nothing of its own is there"


def test_classes_take_turns_apart() -> None:
    """Requests of one class do not use up the turns of another."""
    router, replicas = CauchyRouter(classes=CLASSES[:1]), [*combo(1, 1, 1), *combo(2, 1, 1), *combo(3, 1, 1)]
    goes = [
        router.route(FakeRequest(i, prompt_tokens=5000 if i % 2 else 10), FakeFleet(replicas)).replica for i in range(8)
    ]
    assert goes == [20, 10, 30, 10, 20, 10, 30, 10]


def test_yaml() -> None:
    spec = {"name": "cauchy", "between": "tokens", "classes": [{"combos": ["c1"], "max_prompt_tokens": 9}]}
    router = resolve.router(spec)()
    assert isinstance(router, CauchyRouter) and router.pairs
    replicas = [*combo(1, 1, 1), *combo(2, 1, 1)]
    assert router.route(FakeRequest(prompt_tokens=9), FakeFleet(replicas)).replica == 10
    assert router.route(FakeRequest(prompt_tokens=10), FakeFleet(replicas)).replica == 20


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"between": "goodputs"}, "between: .*goodputs"),
        ({"within": "stricter"}, "within: .*stricter"),
        ({"classes": [{"combo": "c1"}]}, "classes: "),
        ({"classes": [{"combos": []}]}, "combos: expected at least one"),
        ({"classes": [{"combos": ["a"], "min_prompt_tokens": 9, "max_prompt_tokens": 8}]}, "max_prompt_tokens: "),
    ],
)
def test_nonsense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(HeadwayError, match=says):
        resolve.router({"name": "cauchy", **given})


def test_a_pickled_router_goes_on() -> None:
    router, view = CauchyRouter(), FakeFleet([*combo(1, 1, 2, 3.0), *combo(2, 2, 1, 1.0)])
    for i in range(5):
        router.route(FakeRequest(i), view)
    copy = pickle.loads(pickle.dumps(router))
    assert [router.route(FakeRequest(i), view) for i in range(9)] == [
        copy.route(FakeRequest(i), view) for i in range(9)
    ]
