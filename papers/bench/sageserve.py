# ruff: noqa: T201 (a script prints)
"""Speed at SageServe's size: four models in three regions, 20 instances of each there at the start, 2 M requests a day.

    python papers/bench/sageserve.py [--hours 24] [--scaler reactive|lt-ua|...] [--plans] [--digest] [--json FILE]

Tuesday of the second week, all of it, at 1.27 times the published load; one process, plain Python, records included.
Prints requests simulated per second of CPU, seconds, and the peak of memory. `--digest` adds a hash of all records: the
same before and after a change that is only to be faster. `--plans` times what is done once an hour instead: the program
over regions (4 models, 3 regions, 1 type of GPU; 20, 20, 5, to a gap of 1%), and forecasts of twelve series by ARIMA.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.report.run import Run
from headway_papers.reproduce.sageserve.speed import SIZES, forecasts_s, program_s

REGIONS = ("us-east", "us-central", "us-west")
KV_TOKENS = {"bloom-176b": 14_000, "llama-2-70b": 14_000, "llama-3.1-8b": 100_000, "llama-3.2-3b": 100_000}
"""KV cache of an instance, small as the paper's is: about as many instances are needed as there."""
TPS = {"bloom-176b": 700.0, "llama-2-70b": 1300.0, "llama-3.1-8b": 8000.0, "llama-3.2-3b": 10_000.0}
"""Input tokens per second that the plan reckons with: what an instance serves is not simulated first."""
TUESDAY = 168 + 24
SCALE = 1.27
DAY_HOURS = 24.0
BLOCK_ROWS = 1 << 20


def document(hours: float, scaler: str, from_hour: float = 0.0) -> dict[str, Any]:
    """A scenario file's content."""
    fleet = [
        {"name": f"{region}-{model}", "model": model, "gpu": "a100-80gb", "tp": 8, "region": region, "replicas": 20,
         "min_replicas": 2, "max_replicas": 40, "kv_capacity_tokens": tokens}
        for model, tokens in KV_TOKENS.items() for region in REGIONS
    ]  # fmt: skip
    scaling: Any = scaler
    if scaler.startswith("lt-"):
        forecaster = {"name": "arima", "past_hours": 72}
        scaling = {"name": scaler, "plan": {"step_s": 3600.0, "tps": TPS}, "forecaster": forecaster, "planner": "ilp"}
    policies = {
        "routing": "sageserve",
        "admission": "queue-manager",
        "ordering": {"name": "priority-first", "classes": [2]},
        "scaling": scaling,
    }
    workload = {
        "builtin": "sageserve-july-2025",
        "start_hour": TUESDAY + from_hour,
        "duration_s": hours * 3600,
        "scale": SCALE,
    }
    return {
        "workload": workload,
        "fleet": fleet,
        "policies": policies,
        "network": {"inter_region_s": 0.05},
        "provisioning": {"reclaim_s": 60, "redeploy_s": 600, "acquire_s": 600},
        "gpu_limits": [{"region": region, "gpu": "a100-80gb", "count": 8 * 100} for region in REGIONS],
        "simulation": {"until_s": hours * 3600},
    }


def case(hours: float, scaler: str, from_hour: float = 0.0) -> tuple[dict[str, Any], Run]:
    """One line of the table, and the run."""
    chosen = scenario.assemble(document(hours, scaler, from_hour), Places(), Path())
    began_s, cpu_s = time.perf_counter(), time.process_time()
    run = scenario.run(chosen)
    used_s, took_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    num = len(run.records.workload["arrival_s"])
    row = {
        "scaler": scaler,
        "hours": hours,
        "num_requests": num,
        "requests_per_cpu_s": round(num / used_s),
        "seconds": round(took_s, 1),
        "cpu_s": round(used_s, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "replicas": len(run.records.replicas),
        "instance_hours": round(run.summary.gpu_hours / 8, 1),
    }
    return row, run


def plans() -> Iterator[dict[str, Any]]:
    """CPU seconds of programs and forecasts, for the machine may be shared."""
    program_s(4, 3, 1, 0)  # loads the solver
    for size in SIZES.values():
        found = [program_s(*size, seed) for seed in range(5)]
        took = [each["seconds"] for each in found]
        yield {
            "program": "x".join(map(str, size)),
            "median_s": round(statistics.median(took), 4),
            "most_s": round(max(took), 4),
            "largest_gap": round(max(each["gap"] or 0.0 for each in found), 4),
        }
    forecasts = forecasts_s(0)
    yield {
        "forecasts": "12 series by the hour, an hour ahead",
        "mean_s": round(forecasts["seconds"], 3),
        "first_s": round(forecasts["fitting_s"], 3),
    }


def digest(records: Records) -> str:
    """A hash of all that a run leaves, whatever the width of its columns."""
    whole = hashlib.sha256()
    for columns in (records.workload, records.requests, records.segments, records.stretches, records.moves or {}):
        for name in sorted(columns):
            whole.update(name.encode())
            column = columns[name]
            wide = np.float64 if column.dtype.kind == "f" else np.int64
            for at in range(0, len(column), BLOCK_ROWS):
                whole.update(column[at : at + BLOCK_ROWS].astype(wide).tobytes())
    whole.update(msgspec.json.encode(records.replicas))
    return whole.hexdigest()[:16]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=DAY_HOURS)
    parser.add_argument("--from-hour", type=float, default=0.0, help="of the day")
    parser.add_argument("--scaler", action="append", help="as in a scenario; may be given again; else lt-ua")
    parser.add_argument("--plans", action="store_true", help="programs and forecasts instead of a run")
    parser.add_argument("--digest", action="store_true", help="print a hash of the records, too")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.plans:
        for row in plans():
            rows.append(row)
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        options.scaler = options.scaler or [""]
    for scaler in filter(None, options.scaler or ["lt-ua"]):
        row, run = case(options.hours, scaler, options.from_hour)
        rows.append(row | ({"digest": digest(run.records)} if options.digest else {}))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        del run
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
