# ruff: noqa: T201 (a script prints)
"""Seconds to plan deployments of GPU combos, by size of the problem: the median and the slowest of ten.

    python bench/plan_deployment.py

The size of Cauchy's experiments is 3 GPU types, 1 service and 12 candidates; the large one 10 types, 5 services and
500 candidates. Goodputs are drawn at random about what a combo's price would buy, demands so that they take some six
tenths of the GPUs. `explained` adds what binds: a solve for each limit and each demand.
"""

from __future__ import annotations

import random
import statistics
from time import perf_counter

from headway.planner.audit import faults
from headway.planner.candidates import Candidate
from headway.planner.combos import GpuCombo, Group
from headway.planner.deployment import plan
from headway.planner.plan import Demand, Objective, Plan, Problem

SIZES = ((3, 1, 12, 8), (3, 3, 36, 8), (5, 3, 150, 16), (10, 5, 500, 32), (10, 5, 500, 200))
OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")
TIMES = 10


def problem(num_gpus: int, num_services: int, num_candidates: int, limit: int, seed: int) -> Problem:
    """Candidates spread evenly over services."""
    rng = random.Random(seed)
    prices = {f"gpu-{i}": rng.uniform(0.5, 4.0) for i in range(num_gpus)}
    services = [f"service-{i}" for i in range(num_services)]
    found = [_candidate(rng, services[i % num_services], prices) for i in range(num_candidates)]
    usd = sum(limit * price for price in prices.values()) / num_services
    best = {name: max(c.goodput_rps / c.combo.usd_per_hour for c in found if c.service == name) for name in services}
    demands = tuple(Demand(name, 0.6 * usd * best[name] * rng.uniform(0.4, 0.8)) for name in services)
    return Problem(demands, tuple(found), dict.fromkeys(prices, limit))


def _candidate(rng: random.Random, service: str, prices: dict[str, float]) -> Candidate:
    first, second = rng.choice(list(prices)), rng.choice(list(prices))
    num_first, num_second = rng.randint(1, 2), rng.randint(1, 6)
    usd = num_first * prices[first] + num_second * prices[second]
    combo = GpuCombo("model", usd, prefill=Group(first, 1, num_first), decode=Group(second, 1, num_second))
    goodput = usd * rng.uniform(0.5, 1.5)
    return Candidate(service, combo, goodput, goodput * 500 * 3600 / usd)


def timed(asked: Problem, explain: bool) -> tuple[float, Plan]:
    """Milliseconds and the plan."""
    start = perf_counter()
    found = plan(asked, explain=explain)
    return 1e3 * (perf_counter() - start), found


def main() -> None:
    plan(problem(3, 1, 12, 8, 0))  # imports
    print(
        "types  services  candidates  GPUs/type  objective   median ms  slowest ms  explained ms  largest gap  statuses"
    )
    for size in SIZES:
        for objective in OBJECTIVES:
            bare, explained, gaps, statuses = [], [], [0.0], set()
            for seed in range(TIMES):
                made = problem(*size, seed)
                asked = Problem(made.demands, made.candidates, made.limits, objective)
                milliseconds, found = timed(asked, explain=False)
                assert not faults(asked, found)
                bare.append(milliseconds)
                explained.append(timed(asked, explain=True)[0])
                gaps.append(found.gap or 0.0)
                statuses.add(found.status)
            columns = "{:5} {:9} {:11} {:10}".format(*size)
            print(
                f"{columns}  {objective:9} {statistics.median(bare):11.1f} {max(bare):11.1f} "
                f"{statistics.median(explained):13.1f} {max(gaps):12.1e}  {', '.join(sorted(statuses))}"
            )


if __name__ == "__main__":
    main()
