"""What stretches save: how much longer `step="exact"` takes than `step="stretch"`, from small batches to large.

    python bench/stretch_gain.py

One replica of Llama-2-70B on four H100; 1,000 tokens in, output lengths lognormal. CPU time of one process, the two
ways in turn, the median of several ratios.
"""

from __future__ import annotations

import statistics
import sys
import time

import msgspec
import numpy as np

from headway import catalog
from headway.control.policies import Policies
from headway.core.fleet import Fleet, Parallel, Pool
from headway.core.record import Records
from headway.metrics.columns import ints
from headway.policies.resolve import ordering, router
from headway.sim.cluster import Step, simulate
from headway.workload.generate import build
from headway.workload.spec import WorkloadSpec

CASES = ((0.02, 2000, 1000), (0.1, 2000, 1000), (0.2, 2000, 1000), (7.0, 200, 4000))
"""(requests per second, output tokens, number of requests)."""
PAIRS = 5


def run(step: Step, rate: float, output_tokens: int, num_requests: int) -> tuple[float, Records]:
    """CPU seconds of a simulation, and its records."""
    pool = Pool(
        "main",
        catalog.model("llama-2-70b"),
        catalog.gpu("h100-80gb-sxm"),
        catalog.engine("vllm-0.15"),
        Parallel(tp=4),
    )
    lengths = {"kind": "lognormal", "mean": output_tokens, "cv": 0.5, "max": 3 * output_tokens}
    spec = {"num_requests": num_requests, "arrivals": rate, "prompt_tokens": 1000, "output_tokens": lengths}
    source = build(msgspec.convert(spec, WorkloadSpec), 1)
    policies = Policies(router("round-robin"), ordering("fcfs"))
    began = time.process_time()
    records = simulate(Fleet((pool,)), source, policies, seed=1, step=step)
    return time.process_time() - began, records


def case(rate: float, output_tokens: int, num_requests: int) -> str:
    """One line of the table."""
    ratios = []
    for _ in range(PAIRS):
        stretch_s, records = run("stretch", rate, output_tokens, num_requests)
        exact_s, _ = run("exact", rate, output_tokens, num_requests)
        ratios.append(exact_s / stretch_s)
    iterations, decoding = ints(records.stretches, "iterations"), ints(records.stretches, "num_decode")
    batch = np.average(decoding, weights=iterations * (decoding > 0))
    per_request = [int(iterations.sum()) / num_requests, len(iterations) / num_requests]
    return (
        f"{rate:10g} {output_tokens:8} {batch:10.1f} {per_request[0]:12.1f} {per_request[1]:11.1f} "
        f"{statistics.median(ratios):8.2f}"
    )


if __name__ == "__main__":
    sys.stdout.write("requests/s   output mean batch  iterations/r stretches/r    ratio\n")
    for each in CASES:
        sys.stdout.write(case(*each) + "\n")
        sys.stdout.flush()
