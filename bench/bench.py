# ruff: noqa: T201 (a script prints)
"""Speed of the simulator: requests simulated per second of one core, records included.

    python bench/bench.py [--quick] [--scale] [--json FILE]

Llama-2-70B on H100-80 SXM, TP 4, 1,000 tokens in and 200 out, at 70% of the throughput that a saturated replica
reaches (measured first). Every figure is the median of several runs in one process, one core, plain Python; the ratio
is `step="exact"` over `step="stretch"` on the same workload, run in turn.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Records
from headway.policies.resolve import ordering, router
from headway.sim.cluster import Step, simulate
from headway.workload.generate import build
from headway.workload.spec import WorkloadSpec

PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 200
LOAD = 0.7


def fleet(replicas: int) -> Fleet:
    """The fleet under test."""
    pool = Pool(
        name="bench",
        model=catalog.model("llama-2-70b"),
        gpu=catalog.gpu("h100-80gb-sxm"),
        engine=catalog.engine("vllm-v1"),
        parallel=Parallel(tp=4),
        replicas=replicas,
    )
    return Fleet((pool,))


def lengths(kind: str, mean: int) -> Any:
    """A length as the workload's specification takes it."""
    return mean if kind == "fixed" else {"kind": "lognormal", "mean": mean, "cv": 0.5, "max": 3 * mean}


def workload(kind: str, num_requests: int, rate: float) -> WorkloadSpec:
    """Poisson arrivals at `rate` requests/s."""
    spec = {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": lengths(kind, PROMPT_TOKENS),
        "output_tokens": lengths(kind, OUTPUT_TOKENS),
    }
    return msgspec.convert(spec, WorkloadSpec)


def run(kind: str, num_requests: int, rate: float, replicas: int, routing: str, step: Step) -> tuple[float, Records]:
    """Seconds that the simulation took, and its records."""
    source = build(workload(kind, num_requests, rate), 0, Path())
    policies = Policies(router(routing), ordering("fcfs"))
    start = time.perf_counter()
    records = simulate(fleet(replicas), source, policies, seed=0, step=step)
    return time.perf_counter() - start, records


def saturated_rate(kind: str) -> float:
    """Requests/s of one replica with a queue that never empties: the middle half of a run, by ends."""
    _, records = run(kind, 2000, 1000.0, 1, "round-robin", "stretch")
    ends = records.requests["end_s"]
    low, high = ends[len(ends) // 4], ends[3 * len(ends) // 4]
    return float((len(ends) // 2) / (high - low))


def case(kind: str, replicas: int, routing: str, num_requests: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    rate = LOAD * saturated_rate(kind) * replicas
    run(kind, num_requests // 10, rate, replicas, routing, "stretch")
    stretch, exact = [], []
    for _ in range(repeats):
        seconds, records = run(kind, num_requests, rate, replicas, routing, "stretch")
        stretch.append(seconds)
        seconds, _ = run(kind, num_requests, rate, replicas, routing, "exact")
        exact.append(seconds)
    iterations = int(records.stretches["iterations"].sum())
    return {
        "lengths": kind, "replicas": replicas, "routing": routing, "num_requests": num_requests,
        "rate_rps": round(rate, 2), "requests_per_s": round(num_requests / statistics.median(stretch)),
        "spread": [round(num_requests / max(stretch)), round(num_requests / min(stretch))],
        "exact_over_stretch": round(statistics.median(e / s for e, s in zip(exact, stretch, strict=True)), 2),
        "iterations_per_s": round(iterations / statistics.median(stretch)),
        "stretches_per_request": round(len(records.stretches["tick"]) / num_requests, 2),
    }  # fmt: skip


def scaling(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Time and peak memory against the number of requests."""
    rows = []
    rate = LOAD * saturated_rate("lognormal") * 8
    for num_requests in sizes:
        seconds, records = run("lognormal", num_requests, rate, 8, "round-robin", "stretch")
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        row = {"num_requests": num_requests, "seconds": round(seconds, 2), "peak_gib": round(peak_gb, 2)}
        row["us_per_request"] = round(1e6 * seconds / num_requests, 1)
        rows.append(row)
        del records
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, three repeats")
    parser.add_argument("--scale", action="store_true", help="10^4 to 10^7 requests instead of the table")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    options = parser.parse_args()
    if options.scale:
        rows = scaling((10**4, 10**5, 10**6, 10**7) if not options.quick else (10**4, 10**5))
    else:
        num_requests, repeats = (5_000, 3) if options.quick else (50_000, 5)
        rows = []
        for kind in ("fixed", "lognormal"):
            for replicas, routing in (
                (8, "round-robin"),
                (8, "least-loaded"),
                (8, "least-kv"),
                (64, "least-loaded"),
            ):
                rows.append(case(kind, replicas, routing, num_requests, repeats))
                print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps({"python": sys.version, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
