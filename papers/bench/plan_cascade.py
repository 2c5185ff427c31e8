# ruff: noqa: T201 (a script prints)
"""Time to plan a cascade of three models, by number of GPUs: cold, and with the latencies of the cold search known.

    python papers/bench/plan_cascade.py

Quality 85 on Cascadia's trace 1, the rate in proportion to the GPUs, as in `reproduce cascadia` (Figure 10). CPU time,
for the machine may be shared; one core, the search alone, without the rehearsals that `headway plan cascade` adds.
"""

from __future__ import annotations

from dataclasses import replace
from time import process_time

from headway.planning.cascade.candidates import plan
from headway.planning.cascade.deployment import StageLatencies
from headway.planning.cascade.latency import bounds_of, evaluator_of
from headway.planning.cascade.planners import EFFORT
from headway_papers.reproduce.cascadia.setup import planning_case

SIZES = (32, 80)
RPS_PER_GPU = 20 / 32


def main() -> None:
    planning_case("deepseek", 1, 85.0)  # imports
    print("GPUs  simulations  cold s  warm s  p95 s  quality")
    for num_gpus in SIZES:
        case = planning_case("deepseek", 1, 85.0, RPS_PER_GPU * num_gpus)
        problem, latencies = replace(case.problem, num_gpus=num_gpus), StageLatencies(evaluator_of(case))
        seconds = []
        for _ in range(2):
            began = process_time()
            found = plan(problem, latencies, bounds_of(case), EFFORT)
            seconds.append(process_time() - began)
        cold_s, warm_s = seconds
        print(
            f"{num_gpus:4} {latencies.num_evaluated:12} {cold_s:7.2f} {warm_s:7.2f} {found.latency_s:6.2f} "
            f"{found.quality:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
