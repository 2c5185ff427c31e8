# ruff: noqa: T201 (a script prints)
"""Time to plan deployments of GPU combos, by size of the problem and objective.

    python bench/plan_deployment.py

GPUs, models and workloads are the catalog's, goodputs those that the step-time model allows. The size of Cauchy's
experiments is 3 GPU types, 1 service and 12 candidates; the large one 10 types, 5 services, 500 candidates. A demand
is what its service's middling candidate serves for a share of an equal part of all GPUs' price; shares are spread
evenly, and prices are each GPU's own, off by up to a fifth, other ones in each instance. CPU time, for the machine
may be shared; without the explanation of what binds, which solves anew for each limit and each demand.
"""

from __future__ import annotations

from random import Random
from statistics import median
from time import process_time

from msgspec.structs import replace

from headway import catalog
from headway.planning.combos.candidates import select
from headway.planning.combos.estimate import FluidEstimate
from headway.planning.combos.problem import (
    ComboProblem,
    ComboService,
    Objective,
    Offer,
    ServiceDemand,
    ServiceSlo,
    WorkloadPattern,
)
from headway.planning.combos.search import deploy
from headway.planning.combos.verify import faults

GPUS = ("h800", "a800-pcie", "h20", "a10", "rtx-4090", "mi210", "h100", "a100-80gb", "l40s", "h200")
PATTERNS = {
    "sharegpt": (290, 207, ServiceSlo(5.0, 0.03)),
    "cnn-dailymail": (702, 42, ServiceSlo(10.0, 0.05)),
    "longwriter": (337, 1330, ServiceSlo(1.0, 0.03)),
}
SERVICES = (
    ("llama-3.1-8b", "sharegpt"),
    ("llama-3.1-8b", "cnn-dailymail"),
    ("llama-3.1-8b", "longwriter"),
    ("qwen1.5-14b", "sharegpt"),
    ("qwen1.5-14b", "cnn-dailymail"),
)
SIZES = ((3, 1, 12, 8), (3, 3, 36, 8), (5, 3, 150, 16), (10, 5, 500, 8), (10, 5, 500, 32))
NUM_INSTANCES = 30
LEAST, MOST = 0.1, 0.8
"""Share of a demand."""
OBJECTIVES: tuple[Objective, ...] = ("co", "mc", "mce")


def problem(num_gpus: int, num_services: int, num_candidates: int, limit: int, seed: int = 0) -> ComboProblem:
    """Candidates spread evenly over services; demands at a share of 1."""
    engine, random = catalog.engine("vllm-v0"), Random(seed)
    offers = []
    for gpu in map(catalog.gpu, GPUS[:num_gpus]):
        price = round(gpu.usd_per_hour * random.uniform(0.8, 1.2), 2)
        offers.append(Offer(gpu, limit, price, gpus_per_server=2))
    usd = sum(limit * offer.price for offer in offers) / num_services
    candidates, demands = [], []
    for model_name, name in SERVICES[:num_services]:
        model, (r_in, r_out, slo) = catalog.model(model_name), PATTERNS[name]
        service = ComboService(f"{model_name} {name}", model, engine, WorkloadPattern(name, r_in, r_out), slo)
        estimate = FluidEstimate({model.name: model}, {offer.gpu.name: offer.gpu for offer in offers}, engine)
        found = select([service], offers, estimate, top=num_candidates // num_services).candidates
        middling = found[len(found) // 2]
        demands.append(
            ServiceDemand(service.name, usd * middling.goodput_rps / middling.combo.usd_per_hour, r_in + r_out)
        )
        candidates += found
    return ComboProblem(tuple(demands), tuple(candidates), {offer.gpu.name: limit for offer in offers})


def main() -> None:
    deploy(problem(*SIZES[0]))  # imports
    print("types  services  candidates  GPUs/type  objective  median ms  slowest ms  largest gap  statuses")
    for size in SIZES:
        every = [problem(*size, seed) for seed in range(NUM_INSTANCES)]
        for objective in OBJECTIVES:
            milliseconds, gaps, statuses = [], [0.0], set()
            for i, made in enumerate(every):
                share = LEAST + (MOST - LEAST) * i / (NUM_INSTANCES - 1)
                demands = tuple(replace(demand, rps=share * demand.rps) for demand in made.demands)
                asked = replace(made, demands=demands, objective=objective)
                start = process_time()
                found = deploy(asked, explain=False)
                milliseconds.append(1e3 * (process_time() - start))
                assert not faults(asked, found)
                gaps.append(found.gap or 0.0)
                statuses.add(found.status)
            columns = "{:5} {:9} {:11} {:10}".format(*size[:2], len(made.candidates), size[3])
            print(
                f"{columns}  {objective:9} {median(milliseconds):10.1f} {max(milliseconds):11.1f} {max(gaps):12.1e}  "
                f"{', '.join(sorted(statuses))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
