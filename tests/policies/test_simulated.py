"""Every policy in a simulation: all requests end, as the same run again says too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway import catalog
from headway.control.policies import Policies
from headway.core.decision import Placement
from headway.core.fleet import Engine, Fleet, Pool
from headway.core.record import MoveOutcome, Outcome, Records
from headway.core.view import FleetView, RequestView
from headway.policies import MIGRATIONS, ORDERINGS, ROUTERS, resolve
from headway.sim.cluster import simulate
from headway.workload.sources import TraceSource
from headway.workload.table import Workload
from simulation import pairs

NUM_REQUESTS = 200
NUM_OF_A_PAIR = 80
"""Of each of the hundreds of pairs of policies. They come within two seconds, and replicas have to preempt."""


def line(num_decode: int, context: int, chunks: Sequence[tuple[int, int]], *window: int) -> tuple[float, float, None]:
    """An engine whose steps take 10 ms, and a little more for each token."""
    prefill = sum(tokens for tokens, _ in chunks)
    return 0.01 + 1e-4 * num_decode + 1e-5 * prefill, 0.0, None


def run(routing: Any, ordering: Any, migration: Any = None, num_requests: int = NUM_REQUESTS) -> Records:
    rng = np.random.default_rng(0)
    columns = {
        "arrival_s": np.cumsum(rng.exponential(0.02, num_requests)),
        "prompt_tokens": rng.integers(1, 2000, num_requests),
        "output_tokens": rng.integers(1, 200, num_requests),
        "tier": rng.integers(0, 3, num_requests),
        "session_id": rng.integers(-1, 20, num_requests),
    }
    columns["reasoning_tokens"] = columns["output_tokens"] // 2
    workload = Workload(columns)
    engine = Engine("simulated", max_num_seqs=12, max_num_batched_tokens=512)
    pool = Pool(
        "main",
        catalog.model("llama-3.1-8b"),
        catalog.gpu("a100-80gb"),
        engine,
        replicas=3,
        kv_capacity_tokens=9600,
    )
    makes = None if migration is None else resolve.migration(migration)
    policies = Policies(resolve.router(routing), resolve.ordering(ordering), migration=makes)
    return simulate(Fleet((pool,)), TraceSource(workload), policies, seed=1, line=lambda pool: line)


@pytest.mark.parametrize("ordering", ["fcfs", "pascal"])
@pytest.mark.parametrize("migration", [*MIGRATIONS, {"name": "pascal", "adaptive": False}], ids=str)
def test_every_request_ends_wherever_it_goes(migration: Any, ordering: str) -> None:
    records = run("least-footprint", ordering, migration)
    assert (records.requests["outcome"] == Outcome.FINISHED).sum() == NUM_REQUESTS
    assert len(records.moves["request"]) > 0
    done = records.moves["request"][records.moves["outcome"] == MoveOutcome.DONE]
    moves = np.zeros(NUM_REQUESTS, dtype=int)
    moves[records.requests["request"]] = records.requests["moves"]
    assert np.array_equal(np.bincount(done, minlength=NUM_REQUESTS), moves)
    again = run("least-footprint", ordering, migration)
    assert all(np.array_equal(records.moves[c], again.moves[c], equal_nan=True) for c in records.moves)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("routing", "ordering"), pairs(ROUTERS, [*ORDERINGS, {"name": "round-robin", "quantum_tokens": 20}])
)
def test_every_request_ends(routing: str, ordering: Any) -> None:
    records = run(routing, ordering, num_requests=NUM_OF_A_PAIR)
    assert (records.requests["outcome"] == Outcome.FINISHED).sum() == NUM_OF_A_PAIR
    assert records.requests["preemptions"].sum() > 0


@pytest.mark.parametrize(
    ("routing", "ordering"), [*((each, "pascal") for each in ROUTERS), *(("random", each) for each in ORDERINGS)]
)
def test_the_same_run_again(routing: str, ordering: str) -> None:
    first, again = (run(routing, ordering, num_requests=NUM_OF_A_PAIR).requests for _ in range(2))
    assert all(np.array_equal(first[column], again[column], equal_nan=True) for column in first)


@pytest.mark.parametrize("routing", ROUTERS)
def test_a_subclass_decides_as_its_base(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a compiled router: a variant is often a few lines over what is there."""
    base = ROUTERS[routing]

    def route(self: Any, request: RequestView, view: FleetView) -> Placement:
        self.num_routed = getattr(self, "num_routed", 0) + 1
        return base.route(self, request, view)

    monkeypatch.setitem(ROUTERS, "variant", type("Variant", (base,), {"route": route}))
    ran, same = (run(each, "fcfs", num_requests=NUM_OF_A_PAIR).requests for each in ("variant", routing))
    assert all(np.array_equal(ran[column], same[column], equal_nan=True) for column in ran)


def test_the_example_runs_in_a_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    records = run({"name": "my_router:LongPromptsApart", "long_prompt_tokens": 1000}, "fcfs")
    assert (records.requests["outcome"] == Outcome.FINISHED).sum() == NUM_REQUESTS
    assert set(records.requests["replica"]) == {0, 1, 2}


def mean_e2e_s(routing: Any, ordering: Any) -> float:
    records = run(routing, ordering)
    order = records.requests["request"].astype(int)
    return float(np.mean(records.requests["end_s"] - records.workload["arrival_s"][order]))


def test_knowing_lengths_helps() -> None:
    assert mean_e2e_s("least-loaded", "shortest-remaining") < mean_e2e_s("least-loaded", "fcfs")


def test_looking_at_loads_helps() -> None:
    assert mean_e2e_s("jsq-tokens-oracle", "fcfs") < mean_e2e_s("random", "fcfs")
