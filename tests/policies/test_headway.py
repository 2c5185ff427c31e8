"""Headway's own router, ordering and migration, on fleets made by hand; its preset; how it is set beside the others."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import FakeFleet, FakePlaced, FakeReplica, FakeRequest
from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.request import Phase, Segment
from headway.metrics.columns import ints
from headway.policies.migration.headway import HeadwayMigration
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.routing.headway import HeadwayRouter
from headway.reproduce import united
from headway.reproduce.runner import Runner
from headway.reproduce.united import runs
from headway.reproduce.united.rows import ROWS


def chosen(*replicas: FakeReplica, **request: Any) -> int:
    return HeadwayRouter().route(FakeRequest(**request), FakeFleet(list(replicas))).replica


def one(id: int, **given: Any) -> FakeReplica:
    return FakeReplica(id, combo=id, **given)


def test_tokens_to_come_count_as_those_that_are_held() -> None:
    assert chosen(one(0, prefill_tokens_left=1601), one(1, kv_blocks_used=100)) == 1
    assert chosen(one(0, prefill_tokens_left=1599), one(1, kv_blocks_used=100)) == 0
    assert chosen(one(0, kv_blocks_host=101), one(1, kv_blocks_used=100)) == 1


def test_goodput_weighs_and_without_it_the_room_of_those_who_decode() -> None:
    assert chosen(one(0, kv_blocks_used=100, goodput_rps=10.0), one(1, kv_blocks_used=50, goodput_rps=4.0)) == 0
    assert chosen(one(0, kv_blocks_used=100, kv_blocks_total=3000), one(1, kv_blocks_used=50)) == 0
    pair = [FakeReplica(id, combo=9, role=role, kv_blocks_used=60) for id, role in ((0, "prefill"), (1, "decode"))]
    # 120 blocks on a pair of which one decodes, against 100 on a replica like it.
    assert chosen(*pair, one(2, kv_blocks_used=100)) == 2


def test_a_placement_says_how_full_each_would_be() -> None:
    fleet = FakeFleet([one(0, kv_blocks_used=100), one(1, kv_blocks_used=40), one(2, answers_on_pace=False)])
    placed = HeadwayRouter().route(FakeRequest(prompt_tokens=160), fleet)
    assert placed.scores == ((0, pytest.approx(0.11)), (1, pytest.approx(0.05)))


LOADS = st.lists(
    st.builds(
        FakeReplica,
        kv_blocks_used=st.sampled_from([0, 40, 41, 60, 90]),
        kv_blocks_host=st.sampled_from([0, 0, 20]),
        prefill_tokens_left=st.sampled_from([0, 0, 16, 320]),
        kv_blocks_total=st.sampled_from([1000, 1000, 1500]),
        region=st.sampled_from(["near", "far"]),
        role=st.sampled_from(["mixed"] * 20 + ["prefill"]),
        goodput_rps=st.sampled_from([None] * 20 + [2.0]),
        answers_on_pace=st.sampled_from([True, True, False]),
    ),
    min_size=1,
    max_size=9,
)


@given(st.lists(LOADS, min_size=1, max_size=3), st.permutations(range(9)), st.sampled_from(["near", "", "far"]))
def test_the_choice_does_not_depend_on_who_wants_the_scores(
    moments: list[list[FakeReplica]], combos: list[int], region: str
) -> None:
    with_scores, without = HeadwayRouter(), HeadwayRouter()
    for replicas in moments:
        for id, replica in enumerate(replicas):
            replica.id, replica.combo = id, combos[id]
        request = FakeRequest(prompt_tokens=100, region=region)
        placed = without.route(request, FakeFleet(replicas, wants_scores=False))
        assert placed.replica == with_scores.route(request, FakeFleet(replicas)).replica


def test_a_prompt_goes_where_it_is_cached_until_that_holds_up_more() -> None:
    prompt = {"prompt_tokens": 1000, "prefix": (Segment(1, 1000),)}
    cached = {0: 900}
    assert chosen(one(0, cached=cached, num_in_flight=3), one(1), **prompt) == 0  # 100 tokens, for four requests
    assert chosen(one(0, cached=cached, num_in_flight=12), one(1), **prompt) == 1
    assert chosen(one(0, cached=cached, prefill_tokens_left=2000), one(1), **prompt) == 1
    waiting = {"prefill_tokens_left": 2000, "expected_cached_tokens": 1900, "cached": cached}
    assert chosen(one(0, **waiting), one(1), **prompt) == 0
    # Twice the capacity: computed twice as fast, beside half as many requests for its size.
    assert chosen(one(0, cached=cached, kv_blocks_total=1000), one(1, kv_blocks_total=4000), **prompt) == 1


def test_a_far_region_is_chosen_when_the_near_one_is_half_as_full_again() -> None:
    fleet = [one(0, region="near", kv_blocks_used=140), one(1, region="far", kv_blocks_used=100)]
    assert chosen(*fleet, region="near") == 0
    fleet[0].kv_blocks_used = 160
    assert chosen(*fleet, region="near") == 1
    assert chosen(*fleet, region="far") == 1
    with pytest.raises(HeadwayError, match="far"):
        HeadwayRouter(far=0.5)


def test_readers_that_wait_keep_new_requests_away() -> None:
    slow = one(0, answers_on_pace=False)
    assert chosen(slow, one(1, kv_blocks_used=900)) == 1
    assert chosen(slow, one(1, kv_blocks_used=900, answers_on_pace=False)) == 0


def test_a_pair_shares_a_request_and_an_idle_half_takes_all_of_it() -> None:
    pair = [FakeReplica(id, combo=9, role=role, num_in_flight=1) for id, role in ((0, "prefill"), (1, "decode"))]
    fleet = FakeFleet([*pair, one(2, kv_blocks_used=500)])
    placed = HeadwayRouter().route(FakeRequest(), fleet)
    assert (placed.replica, placed.decode) == (0, 1)
    pair[1].num_in_flight = 0
    placed = HeadwayRouter().route(FakeRequest(), fleet)
    assert (placed.replica, placed.decode) == (1, None)


def full(id: int, requests: list[FakePlaced], **given: Any) -> FakeReplica:
    return one(id, kv_blocks_used=1000, num_waiting=1, num_running=4, head_demand_blocks=7, requests=requests, **given)


def test_only_replicas_without_room_or_about_to_stop_send_requests_away() -> None:
    waiting = FakePlaced(5, is_running=False, is_waiting=True, has_kv=False, replica=0)
    free = one(1, num_running=1)
    assert [move.request for move in HeadwayMigration().moves(FakeFleet([full(0, [waiting]), free]))] == [5]
    has_room = one(0, kv_blocks_used=900, num_waiting=1, num_running=4, head_demand_blocks=7, requests=[waiting])
    assert not HeadwayMigration().moves(FakeFleet([has_room, free]))
    has_room.max_num_seqs = 4
    assert HeadwayMigration().moves(FakeFleet([has_room, free]))
    leaving = one(0, num_running=1, is_draining=True, requests=[FakePlaced(6, replica=0)])
    assert [(move.request, move.target) for move in HeadwayMigration().moves(FakeFleet([leaving, free]))] == [(6, 1)]


def test_turns_by_quanta_are_pascals_within_each_tier() -> None:
    both, phases = TiersAndPhasesOrdering(by_quanta=True), PascalOrdering(by_quanta=True)
    assert both.quantum is None
    for tier in (0, 2):
        for done in (0, 499, 500, 1200):
            request = FakeRequest(tier=tier, generated_tokens=done, phase=Phase.REASONING)
            assert both.rank(request, 0.0)[1:] == phases.rank(request, 0.0)[1:]
            assert both.next_change_tokens(request) == phases.next_change_tokens(request)


def assembled(document: Any) -> scenario.Scenario:
    return scenario.assemble(copy.deepcopy(document), Places(), Path())


@pytest.mark.parametrize("part", runs.PARTS)
def test_what_is_compared_differs_in_policies_alone(part: str) -> None:
    documents = runs.documents(part, quick=True)
    assert "headway" in documents and len(documents) > 1
    rest = [{key: value for key, value in each.items() if key != "policies"} for each in documents.values()]
    assert all(each == rest[0] for each in rest)
    for document in documents.values():
        assembled(document)
    assert documents["headway"]["policies"]["routing"] == "headway"


def test_every_claim_has_its_part_and_a_value() -> None:
    for row in ROWS:
        assert row.id.split("-")[0] == row.part.split(" ")[0]
        assert row.other in runs.documents(row.part, quick=True)
    found = united.run(Runner((0,), True, claims=frozenset({"cauchy-slo", "cauchy-e2e"})))
    assert {claim: len(outcome.values) for claim, outcome in found.outcomes.items()} == {
        "cauchy-slo": 1,
        "cauchy-e2e": 1,
    }
    (table,) = found.exhibits
    assert [row[0] for row in table.rows] == ["headway", "cauchy"]  # type: ignore[union-attr]


def test_the_preset_has_something_of_all_five_systems() -> None:
    document = runs.documents("all", quick=True)["headway"]
    document["workload"] = {**document["workload"], "duration_s": 900}
    ran = scenario.run(assembled(document))
    summary = ran.summary
    assert set(summary.tiers) == {"0", "1", "2"} and set(summary.regions) == {"us-east", "eu-west"}
    assert set(summary.models) == {"deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"}
    assert summary.judged and summary.quality is not None
    assert summary.reasoning_s is not None and summary.transfer_s is not None
    assert summary.num_completed == summary.num_requests
    reasoned, output = (ints(ran.records.workload, name).sum() for name in ("reasoning_tokens", "output_tokens"))
    assert reasoned / output == pytest.approx(0.6, abs=0.01)


def test_demand_for_a_later_model_of_a_cascade_is_seen_by_scaling() -> None:
    document = runs.documents("all", quick=True)["headway"]
    document["workload"] = {**document["workload"], "duration_s": 300}
    document["policies"] = {**document["policies"], "scaling": f"{__name__}:Watching"}
    Watching.seen = {}
    summary = scenario.run(assembled(document)).summary
    asked = {
        model: sum(num for (name, _, _), num in Watching.seen.items() if name == model) for model in summary.models
    }
    small, large = "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"
    assert 0.8 * summary.num_requests < asked[small] <= summary.num_requests
    assert 0.3 * asked[small] < asked[large] < 0.6 * asked[small]


class Watching:
    """Scales nothing."""

    interval_s = 10.0
    seen: dict[Any, int]

    def scale(self, view: Any) -> dict[str, int]:
        Watching.seen = {key: num for key, (num, _) in view.arrived.items()}
        return {}
