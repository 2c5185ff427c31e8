"""The sets of replicas: shapes that hold a model, all sets of them, uniform sets."""

from __future__ import annotations

from itertools import product

import pytest

from headway import catalog
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.perf import memory
from headway.planning.cascade.problem import ComboShapes, Replicas, ReplicaSet
from headway.planning.cascade.replica_sets import feasible_shapes, replica_sets, uniform_sets, with_combos, with_units
from headway.planning.cascade.search import Effort
from headway.planning.combos.problem import Offer
from headway.workload.quality_traces import generate_scores

ALL = Effort(stable_rounds=None, gap=0.0)


def test_shapes_hold_the_model_within_servers() -> None:
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    for name in ("deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b", "deepseek-r1-awq"):
        model = catalog.model(name)
        found, reason = feasible_shapes(model, gpu, engine, 32, 8, 4)
        assert found and not reason
        for tp, pp in product(range(1, 10), range(1, 5)):
            try:
                memory.plan(model, gpu, engine, Parallel(tp, pp))
                fits = tp in (1, 2, 4, 8)
            except HeadwayError:
                fits = False
            assert (Parallel(tp, pp) in found) == fits
    assert {(8, 1), (4, 3)} <= {(shape.tp, shape.pp) for shape in found}, "Table 3 places the 671B model so"
    assert feasible_shapes(model, gpu, engine, 5, 8, 4)[0] == ()
    six, _ = feasible_shapes(catalog.model("llama-3-8b"), gpu, engine, 12, 6, 1)
    assert [shape.tp for shape in six] == [1, 2], "groups of four would leave two of six GPUs over"


@pytest.mark.parametrize(("num_gpus", "kinds"), [(6, None), (8, 2), (9, 1)])
def test_sets_are_all_there_are(num_gpus: int, kinds: int | None) -> None:
    of = (Parallel(1, 1), Parallel(2, 1), Parallel(1, 3), Parallel(4, 1))
    sizes = [shape.num_gpus for shape in of]
    every = {
        row
        for row in product(*(range(num_gpus // size + 1) for size in sizes))
        if 1 <= sum(n * size for n, size in zip(row, sizes, strict=True)) <= num_gpus
        and (kinds is None or sum(map(bool, row)) <= kinds)
    }
    found = replica_sets(of, num_gpus, kinds)
    assert sorted(map(tuple, found.counts.tolist())) == sorted(every)
    assert [found[i].num_gpus for i in range(len(found))] == found.cells.tolist()


def test_the_papers_table_3_is_among_the_sets() -> None:
    """All of it has two shapes at most, and GPUs add up to Table 2's."""
    gpu, engine = catalog.gpu("h100"), catalog.engine("vllm")
    rows = [
        (0, 4, {(1, 1): 4}), (1, 8, {(4, 1): 2}), (2, 20, {(4, 3): 1, (8, 1): 1}),
        (0, 4, {(2, 1): 2}), (1, 12, {(2, 1): 6}), (2, 16, {(8, 1): 2}),
        (0, 6, {(1, 1): 6}), (1, 14, {(2, 1): 5, (4, 1): 1}), (2, 12, {(4, 3): 1}),
        (0, 8, {(1, 1): 6, (2, 1): 1}), (1, 16, {(2, 1): 8}), (2, 8, {(8, 1): 1}),
        (0, 18, {(1, 1): 10, (2, 1): 4}), (1, 14, {(4, 1): 2, (2, 1): 3}),
        (0, 24, {(1, 1): 16, (2, 1): 4}), (1, 8, {(2, 1): 4}),
    ]  # fmt: skip
    models = [catalog.model(name) for name in generate_scores(1, 1).models]
    sets = [replica_sets(feasible_shapes(model, gpu, engine, 32, 8, 4)[0], 32, 2) for model in models]
    known = [{found[i] for i in range(len(found))} for found in sets]
    for stage, gpus, counts in rows:
        order = {shape: i for i, shape in enumerate((s.tp, s.pp) for s in sets[stage].shapes)}
        parts = sorted((Replicas(tp, pp, n) for (tp, pp), n in counts.items()), key=lambda p: order[p.tp, p.pp])
        wanted = ReplicaSet(tuple(parts))
        assert wanted.num_gpus == gpus and wanted in known[stage]


def test_uniform_parallelism_fills_servers() -> None:
    of = tuple(Parallel(tp) for tp in (1, 2, 4, 8))
    found = uniform_sets(of, 32, 8)
    by_gpus = {found[i].num_gpus: found[i].label for i in range(len(found))}
    assert by_gpus[4] == "1 x tp 4" and by_gpus[32] == "4 x tp 8" and by_gpus[20] == "1 x tp 4, 2 x tp 8"
    only = with_units(replica_sets(of, 8, 2), {(Replicas(2, 1, 1),): None})
    assert [only[i].label for i in range(len(only))] == ["1 x tp 2", "2 x tp 2", "3 x tp 2", "4 x tp 2"]
    few = with_units(replica_sets(of, 8, 2), {(Replicas(2, 1, 1),): 2, (Replicas(4, 1, 1),): None})
    assert {few[i].label for i in range(len(few))} == {
        "1 x tp 2",
        "2 x tp 2",
        "1 x tp 4",
        "2 x tp 4",
        "1 x tp 2, 1 x tp 4",
        "2 x tp 2, 1 x tp 4",
    }
    spread_over = uniform_sets((Parallel(2, 3), Parallel(4, 2)), 14, 4)
    assert spread_over[len(spread_over) - 1].label == "1 x tp 2 pp 3, 1 x tp 4 pp 2"


def test_combos_of_a_fleet_are_taken_whole() -> None:
    mixed, one = replica_sets((Parallel(1),), 12, 1), Parallel(1)
    offers = (Offer(catalog.gpu("h100"), 12),)
    both = with_combos(mixed, (ComboShapes(one, one, 0.5, 0.5),), offers, 1)
    combo = (Replicas(1, 1, 1, role="prefill"), Replicas(1, 1, 2, role="decode"))
    found = with_units(both, {combo: 3})
    assert [found[i].label for i in range(len(found))] == [
        f"{k} x tp 1 prefill, {2 * k} x tp 1 decode" for k in (1, 2, 3)
    ]
