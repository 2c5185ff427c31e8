"""Every pair of registered policies, on one small fleet with tiers, phases, bounds, regions and batch work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from fakes import FakeFleet, FakePlaced, FakeReplica, FakeRequest
from headway import catalog
from headway.control.observe import MutableFleetView
from headway.control.policies import Policies
from headway.core.decision import Move
from headway.core.fleet import Engine, Fleet, Pool
from headway.core.pacer import Pacer
from headway.core.policy import PhasedOrdering
from headway.core.record import Outcome
from headway.core.request import Phase
from headway.core.view import MigrationView, RequestView
from headway.policies import ADMISSIONS, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve
from headway.policies.migration.pascal import PascalMigration
from headway.policies.ordering.phases import PascalOrdering, TiersAndPhasesOrdering
from headway.policies.ordering.tiers import PriorityOrdering
from headway.policies.routing.kv import LeastFootprintRouter, PascalRouter
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload

NUM, SPAN_S, DEADLINE_S, START_S = 32, 1.5, 20.0, 2.0
PACER = Pacer()
REGIONS, TIERS, BATCH_TIER = ("a", "b"), 4, 2
KINDS: dict[str, list[str | None]] = {
    "router": [*ROUTERS],
    "ordering": [*ORDERINGS],
    "migration": [None, *MIGRATIONS],
    "admission": [None, *ADMISSIONS],
    "scaler": [None, *SCALERS],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    **{
        name: {"plan": {"tps": {"llama-3.1-8b": 400.0}, "step_s": 1.0, "period_s": 2.0, "recent_s": 1.0}}
        for name in ("lt-i", "lt-u")
    },
    "lt-ua": {"plan": {"tps": {"llama-3.1-8b": 400.0}, "step_s": 1.0, "period_s": 2.0}, "last_s": 1.0},
    "timetable": {"counts": {"a": [1, 3, 2], "b": [2, 1]}, "step_s": 2.0},
    "queue-manager": {"urgent_after_s": 3.0},
    "by-deadline": {"margin_s": DEADLINE_S - 5.0},
}
HELD_S: dict[str | None, float] = {None: 0.0, "queue-manager": 3.0 + 1.0, "by-deadline": DEADLINE_S / 2 + 1.0}
"""The longest for which an admission policy holds a request, whatever the load, with its interval."""


@cache
def workload() -> Workload:
    """A burst that no replica can hold at once, of interactive and batch work that reasons and answers."""
    rng = np.random.default_rng(1)
    tier, output = rng.integers(0, TIERS, NUM), rng.integers(20, 160, NUM)
    at_s = np.sort(rng.uniform(0, SPAN_S, NUM))
    return Workload(
        {
            "arrival_s": at_s,
            "prompt_tokens": rng.integers(50, 600, NUM),
            "output_tokens": output,
            "reasoning_tokens": (output * rng.uniform(0, 0.9, NUM)).astype(int),
            "tier": tier,
            "region": rng.integers(0, 2, NUM),
            "slo_ttft_s": np.where(tier >= BATCH_TIER, np.nan, 1.0 + tier),
            "deadline_s": np.where(tier >= BATCH_TIER, at_s + DEADLINE_S, np.nan),
        },
        regions=REGIONS,
    )


@cache
def fleet() -> Fleet:
    engine = Engine("simulated", max_num_seqs=6, max_num_batched_tokens=2048)
    model, gpu = catalog.model("llama-3.1-8b"), catalog.gpu("a100-80gb")
    return Fleet(tuple(
        Pool(region, model, gpu, engine, region=region, replicas=num, min_replicas=1, max_replicas=num + 1,
             kv_capacity_tokens=2000, start_s=START_S)
        for region, num in (("a", 2), ("b", 1))
    ))  # fmt: skip


@cache
def serial_s() -> float:
    """Seconds in which one replica serves the requests one after the other: the most that any order may need."""
    rows = workload().with_columns({"arrival_s": np.arange(NUM) * 1e3, "deadline_s": np.full(NUM, np.nan)})
    alone = Fleet((structs.replace(fleet().pools[0], replicas=1, max_replicas=None),))
    done = simulate(alone, TraceSource(rows), policies("least-loaded", "fcfs"), seed=0).requests
    return float((done["end_s"] - rows.arrival_s[done["request"]]).sum())


class PascalWatched(PascalMigration):
    """Algorithm 2, with its inputs compared with the requests themselves at each decision."""

    def __init__(self) -> None:
        super().__init__(host_counts=True)

    def at_phase(self, request: RequestView, view: MigrationView) -> Move | None:
        for replica in view.replicas:
            there = [one for one in replica.requests if not one.is_moving]
            moving = len(replica.requests) - len(there)
            reasoning = sum(one.phase is Phase.REASONING for one in (*there, *replica.paused))
            assert reasoning <= view.num_reasoning(replica) <= reasoning + moving + replica.num_arriving
            late = [one for one in replica.paused if reader_waits(one, view.now)]
            assert not (late and replica.answers_on_pace)
        return super().at_phase(request, view)


def reader_waits(request: Any, now: float) -> bool:
    start_s = PACER.start_s(request.reasoning_end_s, request.answer_s)
    return start_s is not None and PACER.run_dry_s(start_s, request.answer_tokens) < now


def policies(
    router: str, ordering: str, migration: str | None = None, admission: str | None = None, scaler: str | None = None
) -> Policies:
    def spec(name: str) -> Any:
        return {"name": name, **ARGUMENTS[name]} if name in ARGUMENTS else name

    made = resolve.ordering(spec(ordering))
    is_preemptive = made().preemptive
    shares = hasattr(made(), "started")
    return Policies(
        resolve.router(spec(router)),
        made,
        ordering_at="gateway" if shares or is_preemptive else "both",
        window=6,
        preempt_every_s=0.2 if is_preemptive and not shares else None,
        migration=PascalWatched if migration == "pascal" else migration and resolve.migration(spec(migration)),
        admission=admission and resolve.admission(spec(admission)),
        scaler=scaler and resolve.scaler(spec(scaler)),
    )


Row = dict[str, str | None]
Pair = tuple[tuple[str, str | None], tuple[str, str | None]]


def pairs_of(row: Row) -> set[Pair]:
    return set(combinations(sorted(row.items()), 2))  # type: ignore[arg-type]


def covering() -> Iterator[Row]:
    """Rows of one policy of each kind, in which every pair occurs: each router with each ordering, and, by a greedy
    choice, the other kinds."""
    covered: set[Pair] = set()
    others = ("migration", "admission", "scaler")
    for router in KINDS["router"]:
        for ordering in KINDS["ordering"]:
            row: Row = {"router": router, "ordering": ordering}
            for kind in others:
                row[kind] = max(KINDS[kind], key=lambda name: len(pairs_of({**row, kind: name}) - covered))
            covered |= pairs_of(row)
            yield row
    for one, other in combinations(sorted(KINDS), 2):  # what the greedy choice has left
        for a, b in product(KINDS[one], KINDS[other]):
            if ((one, a), (other, b)) not in covered:
                row = {kind: names[0] for kind, names in KINDS.items()} | {one: a, other: b}
                covered |= pairs_of(row)
                yield row


ROWS = list(covering())


def test_every_pair_occurs() -> None:
    covered = set().union(*map(pairs_of, ROWS))
    for one, other in combinations(sorted(KINDS), 2):
        missing = {(a, b) for a in KINDS[one] for b in KINDS[other] if ((one, a), (other, b)) not in covered}
        assert not missing, (one, other, missing)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("router", KINDS["router"])
def test_every_pair_serves_all_requests_in_time_and_within_bounds(router: str) -> None:
    """Conservation; no starvation: a fleet that works while requests wait needs no longer than one replica alone, after
    the last one was released. Control refuses the run of a scaler that wants more replicas than a pool may have."""
    for row in (row for row in ROWS if row["router"] == router):
        made = policies(**row)  # type: ignore[arg-type]
        done = simulate(fleet(), TraceSource(workload()), made, seed=0, pacer=PACER).requests
        assert sorted(done["request"].tolist()) == list(range(NUM)), row
        assert (done["outcome"] == Outcome.FINISHED).all(), row
        assert (done["generated_tokens"] == workload().columns["output_tokens"][done["request"]]).all(), row
        latest_s = SPAN_S + HELD_S[row["admission"]] + START_S + serial_s()
        assert done["end_s"].max() <= latest_s, (row, done["end_s"].max(), latest_s)


def at_phase(ordering: Any, *replicas: FakeReplica) -> int:
    """Where PASCAL's Algorithm 2 lets a request of replica 0 answer, with the view that control fills."""
    view = MutableFleetView(Random(0))
    view.phased, view.replicas = ordering if isinstance(ordering, PhasedOrdering) else None, replicas
    request = FakePlaced(1000, replica=0, generated_tokens=36)
    move = PascalMigration(adaptive=False).at_phase(request, view)
    return 0 if move is None else move.target


def reasoning(id: int, tiers: list[int], ordering: Any, **more: Any) -> FakeReplica:
    """A replica whose ordering has these requests, which reason, in its queues."""
    requests = [FakePlaced(100 * id + i, tier=tier, phase=Phase.REASONING) for i, tier in enumerate(tiers)]
    lengths = [len(tiers)]
    if isinstance(ordering, PhasedOrdering):
        lengths = [0] * ordering.num_queues
        for each in requests:
            lengths[ordering.queue(each)] += 1
    return FakeReplica(id, requests=requests, queue_lengths=lengths, **more)


@pytest.mark.parametrize("name", [*ORDERINGS])
def test_algorithm_2_counts_the_reasoning_of_all_tiers(name: str) -> None:
    """20 requests of tier 1 reason at replica 0, one of tier 0 at replica 1: r_0 = 20, r_1 = 1, so it moves to 1."""
    ordering = resolve.ordering(name)()
    assert at_phase(ordering, reasoning(0, [1] * 20, ordering), reasoning(1, [0], ordering)) == 1
    assert at_phase(ordering, reasoning(0, [3], ordering), reasoning(1, [0, 1, 2], ordering)) == 0


@pytest.mark.parametrize("phases_first", [False, True])
def test_algorithm_2_leaves_out_what_was_demoted(phases_first: bool) -> None:
    ordering = TiersAndPhasesOrdering(demotion_tokens=50, phases_first=phases_first)
    assert at_phase(ordering, reasoning(0, [1] * 3, ordering), reasoning(1, [0], ordering)) == 0  # all demoted: 0 and 0
    high = TiersAndPhasesOrdering(phases_first=phases_first)
    assert at_phase(high, reasoning(0, [1] * 3, high), reasoning(1, [0], high)) == 1


@pytest.mark.parametrize("ordering", [PascalOrdering(), TiersAndPhasesOrdering(), PriorityOrdering()])
def test_algorithms_count_what_is_paused_in_front_of_the_replicas(ordering: Any) -> None:
    """By hand: 2 reason at replica 0; 1 at replica 1, and 2 that it paused. Blocks have 16 tokens: m_1 = 5 + 2 * 7."""
    paused = [FakeRequest(7 + i, phase=Phase.REASONING, generated_tokens=10) for i in range(2)]
    here = reasoning(0, [0, 1], ordering, kv_blocks_used=18)
    there = reasoning(1, [0], ordering, kv_blocks_used=5, paused=paused)
    assert at_phase(ordering, here, there) == 0
    assert at_phase(ordering, here, replace(there, paused=paused[:0])) == 1
    for router in (PascalRouter(), LeastFootprintRouter()):
        assert router.route(FakeRequest(), FakeFleet([here, there])).replica == 0
        assert router.route(FakeRequest(), FakeFleet([here, replace(there, paused=paused[:1])])).replica == 1
