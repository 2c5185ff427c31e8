"""Combos as stages' replicas: which are offered, all sets of them, plans against brute force, bounds against runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import ceil, floor, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cascade_queues import GPU, MIDDLE, SMALL, HonestBounds, Queue, problem, searched
from headway import catalog
from headway.control.policies import Policies
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.core.record import MoveOutcome, Records
from headway.planning.cascade import latency as stages
from headway.planning.cascade.candidates import candidates, plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import StageSimulator
from headway.planning.cascade.latency_bounds import NoBounds, StepTimeBounds
from headway.planning.cascade.planners import cascade_serve, stand_alone, uniform_allocation, uniform_parallelism
from headway.planning.cascade.problem import (
    CascadePlan,
    CascadeProblem,
    Cheapest,
    ComboShapes,
    Floats,
    LatencyBudget,
    Lengths,
    QualityFloor,
    Target,
)
from headway.planning.cascade.replica_sets import LIMITS, ReplicaSets, all_sets, combo_kinds_of
from headway.planning.cascade.search import Effort, Search
from headway.planning.combos.estimate import InstanceSpeed
from headway.planning.combos.problem import Offer, ServiceSlo, WorkloadPattern
from headway.policies import resolve
from headway.sim.cluster import simulate
from headway.workload.quality_traces import generate_scores
from headway_papers.reproduce.cascadia.exhaustive import exhaustive

ALL = Effort(stable_rounds=None, gap=0.0)
CHEAP = structs.replace(GPU, name="cheap", memory_bytes=40e9, usd_per_hour=0.7)
SPEED = {"cheap": 0.45}


def queue() -> Queue:
    return Queue(speed=SPEED)


def split(prefill: tuple[str, int], decode: tuple[str, int], least: float = 0.4, most: float = 1.2) -> ComboShapes:
    return ComboShapes(Parallel(prefill[1]), Parallel(decode[1]), least, most, prefill[0], decode[0])


ONE_TYPE = {"small": (split(("", 1), ("", 2)),), "middle": (split(("", 1), ("", 1)), split(("", 2), ("", 1), 0.2, 0.9))}
UNLIKE = {
    "small": (split(("cheap", 1), ("gpu", 1)), split(("gpu", 1), ("gpu", 2))),
    "middle": (split(("gpu", 1), ("cheap", 1), 1.1, 2.3), split(("cheap", 1), ("gpu", 1))),
}


def asked(
    num: int, others: int, target: Target, seed: int = 0, stages: int = 2, rate_rps: float = 3.0
) -> CascadeProblem:
    """With `others`, on two types of GPU."""
    made = problem(stages, num, rate_rps, target, seed, num_requests=8, max_pp=1, max_kinds=1)
    if not others:
        return replace(made, combo_kinds=ONE_TYPE)
    return replace(made, other_offers=(Offer(CHEAP, others, gpus_per_server=2),), combo_kinds=UNLIKE)


def taken(found: CascadePlan) -> dict[str, int]:
    by_type: dict[str, int] = {}
    for part in (part for stage in found.stages for part in stage.replicas):
        by_type[part.gpu] = by_type.get(part.gpu, 0) + part.num_gpus
    return by_type


def roles(found: CascadePlan) -> set[str]:
    return {part.role for stage in found.stages for part in stage.replicas}


# Sets.


def test_sets_are_all_there_are_on_one_type() -> None:
    """Mixed ones of one shape; one kind of combo within its balance, and beside the middle of it mixed ones."""
    made = all_sets(asked(5, 0, QualityFloor(60.0)))(0, (True, True))
    every = {f"{n} x tp {tp}" for tp in (1, 2, 4) for n in range(1, 5 // tp + 1)}
    for x, y, one, two in product(range(1, 6), range(1, 3), range(6), range(3)):
        is_middle = x in (max(1, floor(sqrt(0.48) * y)), ceil(sqrt(0.48) * y))
        if x + 2 * y + one + 2 * two > 5 or not max(1, floor(0.4 * y)) <= x <= ceil(1.2 * y) or (one and two):
            continue
        if is_middle or not (one or two):
            beside = [f"{one} x tp 1"] * bool(one) + [f"{two} x tp 2"] * bool(two)
            every.add(", ".join([*beside, f"{x} x tp 1 prefill", f"{y} x tp 2 decode"]))
    found = [made[i].label for i in range(len(made))]
    assert sorted(found) == sorted(every) and len(set(found)) == len(found)
    assert [made[i].num_gpus for i in range(len(made))] == made.cells.tolist()
    assert made.are_split.tolist() == ["prefill" in label for label in found]


def test_sets_on_two_types_keep_to_what_there_is() -> None:
    made = all_sets(asked(3, 2, QualityFloor(60.0)))(1, (True, True))
    plain = all_sets(replace(asked(3, 2, QualityFloor(60.0)), combo_kinds={}))(1, (True, True))
    labels = [made[i].label for i in range(len(made))]
    assert labels[: len(plain)] == [plain[i].label for i in range(len(plain))], "and all that there are without combos"
    assert (made.vectors <= [3, 2]).all() and len(set(labels)) == len(labels)
    assert "3 x gpu tp 1 prefill, 2 x cheap tp 1 decode" in labels
    assert "1 x cheap tp 1, 2 x gpu tp 1 prefill, 1 x cheap tp 1 decode" in labels
    for i, vector in enumerate(made.vectors.tolist()):
        by_type = {name: sum(p.num_gpus for p in made[i].parts if p.gpu == name) for name in ("gpu", "cheap")}
        assert [by_type["gpu"], by_type["cheap"]] == vector
        assert sorted(p.role for p in made[i].parts if p.role != "mixed") in ([], ["decode", "prefill"])
    one = all_sets(replace(asked(3, 2, QualityFloor(60.0)), max_types=1))(0, (True, True))
    assert {one[i].label for i in range(len(one)) if one.are_split[i]} == {"1 x gpu tp 1 prefill, 1 x gpu tp 2 decode"}


# Plans.

TARGETS = st.one_of(
    st.builds(QualityFloor, st.floats(20.0, 100.0)),
    st.builds(LatencyBudget, st.floats(0.3, 8.0)),
    st.builds(Cheapest, st.floats(20.0, 95.0), st.floats(0.5, 8.0)),
)


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(0, 3), st.integers(1, 3), TARGETS, st.booleans())
def test_a_full_look_finds_what_exhaustive_search_finds(
    seed: int, num: int, others: int, stages: int, target: Target, use_all: bool
) -> None:
    made = asked(num, others, target, seed, stages)
    made = replace(made, use_all=use_all and not others and not isinstance(target, Cheapest))
    try:
        oracle = exhaustive(made, StageLatencies(queue()))
    except HeadwayError:
        with pytest.raises(HeadwayError, match="no set of replicas serves"):
            plan(made, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        return
    found = plan(made, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
    assert found.objective == pytest.approx(oracle.objective)
    limits = {"gpu": num, "cheap": others} if others else {"": num}
    assert all(num_gpus <= limits[name] for name, num_gpus in taken(found).items())


def test_offered_combos_never_make_a_full_look_worse_and_at_times_better() -> None:
    gains, used = [], set[str]()
    for seed, others in product(range(5), (0, 3)):
        made = asked(5, others, QualityFloor(60.0), seed, rate_rps=14.0)
        with_ = plan(made, StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        without = plan(replace(made, combo_kinds={}), StageLatencies(queue()), HonestBounds(queue(), seed), ALL)
        assert with_.objective <= without.objective + 1e-9 and roles(without) == {"mixed"}
        gains.append(with_.latency_s < without.latency_s - 1e-9)
        used |= roles(with_)
    assert any(gains) and used == {"mixed", "prefill", "decode"}


@pytest.mark.ci
def test_candidates_keep_to_each_type_and_baselines_are_those_without_combos() -> None:
    target = QualityFloor(60.0)
    made = asked(5, 4, target, 1, 3, 14.0)
    search = Search(made, StageLatencies(queue()), NoBounds(), Effort(stable_rounds=4))
    found = [*candidates(search, search.run(target), "test", 6)]
    found.append(stand_alone(made, "small", StageLatencies(queue()), NoBounds(), ALL))
    assert "decode" in roles(found[0])
    for planner in (searched(uniform_parallelism), searched(uniform_allocation), cascade_serve):
        plain, other = (
            planner(each, StageLatencies(queue()), NoBounds(), ALL) for each in (replace(made, combo_kinds={}), made)
        )
        assert plain.stages == other.stages and roles(other) == {"mixed"}
        found.append(other)
    for each in found:
        assert all(num <= {"gpu": 5, "cheap": 4}[name] for name, num in taken(each).items())


# What is offered.


def cascade(*gpus: str, prompt_tokens: int = 3000, num: int = 8, rate_rps: float = 2.0) -> CascadeProblem:
    drawn = generate_scores(1, 60, cascade="llama")
    table = replace(drawn, prompt_tokens=np.maximum(drawn.prompt_tokens * prompt_tokens // 188, 1))
    table = replace(table, models=("llama-3.1-8b", "llama-3.1-70b"))
    first, *others = (Offer(catalog.gpu(name), num) for name in gpus)
    models = tuple(catalog.model(name) for name in table.models)
    more = tuple(others)
    return CascadeProblem(
        models,
        first.gpu,
        catalog.engine("sglang"),
        num,
        rate_rps,
        table,
        QualityFloor(75.0),
        other_offers=more,
        max_kinds=1,
    )


@pytest.mark.parametrize("gpus", [("h100-80gb-sxm",), ("h800", "h20")])
def test_offered_shapes_take_the_fewest_gpu_seconds_within_a_limit(gpus: tuple[str, ...]) -> None:
    """Of each phase for itself, against every shape; numbers of both where neither phase waits for the other."""
    made = cascade(*gpus)
    found = combo_kinds_of(made, {})
    for stage, model in enumerate(made.models):
        scores = made.scores
        pattern = WorkloadPattern(
            None, float(scores.prompt_tokens.mean()), float(scores.output_tokens[:, stage].mean())
        )
        longest = (scores.prompt_tokens + scores.output_tokens[:, stage]).max()
        for offer in made.offers:
            shapes = dict[int, InstanceSpeed]()
            for tp in (1, 2, 4, 8):
                try:
                    shapes[tp] = InstanceSpeed(model, offer.gpu, made.engine, tp)
                except HeadwayError:
                    continue
            shapes = {tp: each for tp, each in shapes.items() if each.kv_tokens >= longest}
            step_s = min(each.step_s(pattern, 1) for each in shapes.values())
            prompt_s = min(each.prompts_s(pattern, 1) for each in shapes.values())
            prefills, decodes = set[int](), set[int]()
            for limit in LIMITS[:2]:
                ttft, tpot = ServiceSlo(ttft_s=limit * prompt_s), ServiceSlo(tpot_s=limit * step_s)
                prefills.add(max(shapes, key=lambda tp, s=ttft: shapes[tp].prefill_rps(pattern, s) / tp))  # type: ignore[misc]
                decodes.add(max(shapes, key=lambda tp, s=tpot: shapes[tp].decode_rps(pattern, s) / tp))  # type: ignore[misc]
            prefills.add(max(shapes, key=lambda tp: shapes[tp].prefill_rps(pattern, ServiceSlo()) / tp))
            decodes.add(max(shapes, key=lambda tp: shapes[tp].decode_rps(pattern, ServiceSlo()) / tp))
            name = offer.gpu.name if made.other_offers else ""
            own = [each for each in found[model.name] if each.prefill_gpu == name]
            assert {each.prefill.tp for each in own} <= prefills
            assert {each.decode.tp for each in found[model.name] if each.decode_gpu == name} <= decodes
            for each in own:
                if each.decode_gpu == name:
                    rps = (
                        shapes[each.decode.tp].decode_rps(pattern, ServiceSlo()),
                        shapes[each.prefill.tp].prefill_rps(pattern, ServiceSlo()),
                    )
                    assert each.least <= each.most == pytest.approx(rps[0] / rps[1])
        pairs = {(each.prefill_gpu, each.decode_gpu) for each in found[model.name]}
        assert len(pairs) == len(gpus) ** 2, "either direction of every pair of types"


def test_what_holds_no_request_or_has_no_room_is_not_offered() -> None:
    one = cascade("h100-80gb-sxm", num=1)
    assert combo_kinds_of(one, {}) == {"llama-3.1-8b": (), "llama-3.1-70b": ()}
    long = cascade("h100-80gb-sxm", prompt_tokens=60_000)
    shapes = {each.prefill.tp for each in combo_kinds_of(long, {})["llama-3.1-70b"]}
    assert shapes and min(shapes) > min(
        each.prefill.tp for each in combo_kinds_of(cascade("h100-80gb-sxm"), {})["llama-3.1-70b"]
    )
    slow = {each.most for each in combo_kinds_of(cascade("h100-80gb-sxm"), {}, 1e8)["llama-3.1-8b"]}
    assert slow == {1.0}, "where the network is all that counts, both phases are as fast"


# Bounds.


def simulated(made: CascadeProblem, routing: str = "least-loaded", rounds: int = 2) -> StageSimulator:
    policies = Policies(resolve.router(routing), resolve.ordering("fcfs"))
    others = {offer.gpu.name: offer.gpu for offer in made.other_offers}
    return StageSimulator(made.gpu, made.engine, policies, 3, rounds, other_gpus=others)


def all_of(
    made: CascadeProblem, stage: int, routing: str, rounds: int
) -> tuple[ReplicaSets, Lengths, StageSimulator, Floats]:
    """A stage's sets with all of its requests, its evaluator, and bounds."""
    made = replace(made, combo_kinds=combo_kinds_of(made, {}))
    sets, lengths = all_sets(made)(stage, ()), made.lengths(stage, np.ones(len(made.scores), np.bool_))
    others = {offer.gpu.name: offer.gpu for offer in made.other_offers}
    bounds = StepTimeBounds(made.gpu, made.engine, rounds, other_gpus=others, in_place=routing != "least-loaded")
    lower, estimate = bounds.estimate(made.models[stage], sets, made.rate_rps, lengths)
    assert (estimate >= lower).all()
    return sets, lengths, simulated(made, routing, rounds), lower


@pytest.mark.ci
@pytest.mark.parametrize(
    ("stage", "rate_rps", "prompt_tokens", "routing"),
    [
        (0, 8.0, 3000, "least-loaded"),
        (0, 60.0, 160, "least-loaded"),
        (1, 1.0, 3000, "least-loaded"),
        (1, 4.0, 3000, "cauchy"),
        (0, 40.0, 160, "headway"),
    ],
)
def test_no_simulation_with_a_combo_is_faster_than_its_bound(
    stage: int, rate_rps: float, prompt_tokens: int, routing: str
) -> None:
    made = cascade("h800", "h20", prompt_tokens=prompt_tokens, rate_rps=rate_rps)
    sets, lengths, evaluator, lower = all_of(made, stage, routing, 2)
    combos = np.flatnonzero(sets.are_split)
    picked = np.random.default_rng(stage).choice(combos, min(len(combos), 30), replace=False)
    truth = [evaluator.p95_latency_s(made.models[stage], sets[int(i)], rate_rps, lengths) for i in picked]
    assert np.isfinite(truth).any() and (lower[picked] <= truth).all(), "a bound above the truth"


@pytest.mark.ci
def test_bounds_hold_where_a_combo_is_full_and_whoever_prefills_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardly any room for KV caches some hand-overs find none, and those requests stay where they are."""
    refused = list[int]()

    def counting(*args: Any, **options: Any) -> Records:
        records = simulate(*args, **options)
        refused.append(int((records.moves["outcome"] == MoveOutcome.FULL).sum()))
        return records

    monkeypatch.setattr(stages, "simulate", counting)
    made = cascade("h800", "h20", prompt_tokens=600, rate_rps=100.0)
    made = replace(made, engine=structs.replace(made.engine, gpu_memory_utilization=0.205))
    sets, lengths, evaluator, lower = all_of(made, 0, "least-loaded", 8)
    picked = np.random.default_rng(0).choice(np.flatnonzero(sets.are_split), 30, replace=False)
    truth = [evaluator.p95_latency_s(made.models[0], sets[int(i)], 100.0, lengths) for i in picked]
    assert sum(refused) > 20 and (lower[picked] <= truth).all()


@pytest.mark.ci
def test_bounds_hold_where_the_longest_requests_fit_on_those_that_decode_alone() -> None:
    """They are computed there as a whole."""
    made = cascade("a10", "h100-80gb-sxm", prompt_tokens=20_000, rate_rps=0.5)
    made = replace(made, combo_kinds={"llama-3.1-8b": (split(("a10", 1), ("h100-80gb-sxm", 1), 0.2, 3.0),)})
    lengths = made.lengths(0, np.ones(len(made.scores), np.bool_))
    speeds = InstanceSpeed(made.models[0], made.gpu, made.engine, 1)
    assert speeds.kv_tokens < (lengths.prompt_tokens + lengths.output_tokens).max()
    sets, evaluator = all_sets(made)(0, ()), simulated(made)
    others = {offer.gpu.name: offer.gpu for offer in made.other_offers}
    lower, _ = StepTimeBounds(made.gpu, made.engine, 2, other_gpus=others).estimate(made.models[0], sets, 0.5, lengths)
    picked = np.flatnonzero(sets.are_split)[::5]
    truth = [evaluator.p95_latency_s(made.models[0], sets[int(i)], 0.5, lengths) for i in picked]
    assert np.isfinite(truth).all() and (lower[picked] <= truth).all()


def test_a_combo_that_cannot_keep_up_is_ruled_out_without_a_simulation() -> None:
    """Bounds say something: those of combos rise with the load, and with fewer replicas for a phase."""
    made = cascade("h100-80gb-sxm", rate_rps=10.0)
    made = replace(made, combo_kinds={"llama-3.1-8b": (split(("", 1), ("", 1), 0.1, 7.0),)})
    sets, model = all_sets(made)(0, ()), made.models[0]
    lengths = made.lengths(0, np.ones(len(made.scores), np.bool_))
    bounds = StepTimeBounds(made.gpu, made.engine, 30)
    labels = [sets[i].label for i in range(len(sets))]
    by_rate = [
        dict(zip(labels, bounds.estimate(model, sets, rate, lengths)[0].tolist(), strict=True)) for rate in (2.0, 40.0)
    ]
    few, many = ("1 x tp 1 prefill, 7 x tp 1 decode", "4 x tp 1 prefill, 4 x tp 1 decode")
    assert by_rate[1][few] > 2 * by_rate[1][many] and by_rate[0][few] < by_rate[1][few] / 2
    lone = "1 x tp 1 prefill, 1 x tp 1 decode"
    assert by_rate[0][lone] <= simulated(made).p95_latency_s(model, sets[labels.index(lone)], 2.0, lengths)


def test_what_a_combo_hands_over_takes_the_network_s_time() -> None:
    made = cascade("h100-80gb-sxm", rate_rps=2.0)
    made = replace(made, combo_kinds=combo_kinds_of(made, {}))
    sets = all_sets(made)(0, ())
    lengths = made.lengths(0, np.ones(len(made.scores), np.bool_))
    own = simulated(made)
    slow = replace(own, handover_settings=structs.replace(own.handover_settings, network_bytes_per_s=2e8))
    i = next(i for i in range(len(sets)) if sets[i].label.endswith("decode"))
    fast_s, slow_s = (each.p95_latency_s(made.models[0], sets[i], 2.0, lengths) for each in (own, slow))
    assert slow_s > fast_s + 1.0


def test_names_of_the_papers_models_are_free() -> None:
    """`combo_kinds` are by model: a cascade of some of the models has theirs."""
    made = asked(5, 0, QualityFloor(60.0), 0, 2)
    alone = replace(made, models=(MIDDLE,))
    assert SMALL.name not in alone.names
    labels = {all_sets(alone)(0, ())[i].label for i in range(len(all_sets(alone)(0, ())))}
    assert "1 x tp 2 prefill, 1 x tp 1 decode" in labels and "1 x tp 1 prefill, 1 x tp 2 decode" not in labels
