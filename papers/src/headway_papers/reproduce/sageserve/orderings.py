"""Orderings on a fixed fleet that is overloaded for half an hour (7.2.6)."""

from __future__ import annotations

import copy
from math import sqrt
from pathlib import Path

import numpy as np

from headway import scenario
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway_papers.reproduce.sageserve.measures import BATCH, waits
from headway_papers.reproduce.sageserve.scenes import (
    A100,
    LLAMA_2,
    ORDERINGS,
    REGIONS,
    THURSDAY,
    Document,
    Scene,
    pool,
    whole_document,
)
from headway_papers.reproduce.tasks import Measurement

INSTANCES = (4, 3, 3)
"""Keyed by region."""
SURGE_S = (900.0, 2700.0)
NORMAL_TTFT_S = 5.6
"""The normal tier's promise. According to 7.2.6, a quarter of first tokens are late with a third quartile of 5.6 s, so
the limit there was 5.6 s and not the minute of 2.2."""
LATE = 0.45
"""Late share of the fast tier's first tokens under FCFS, the starting point of 7.2.6."""
NEAR = 0.01
SEARCHED = (1.0, 3.0)
MOST_TRIALS = 7


def document(ordering: str, factor: float, tau_n_s: float | None = None) -> Document:
    """`factor` times the load of an afternoon, for half an hour. `tau_n_s`: of DPA; None: the default."""
    scene = Scene(models=(LLAMA_2,), from_hour=THURSDAY + 13, hours=1.0)
    fleet = [pool(A100, LLAMA_2, region, "", num) for region, num in zip(REGIONS, INSTANCES, strict=True)]
    policies: Document = {"routing": "sageserve", "admission": "queue-manager", "ordering": ORDERINGS[ordering]}
    if tau_n_s is not None:
        policies["ordering"] = {"name": ORDERINGS[ordering], "tau_n_s": tau_n_s}
    contents = whole_document(scene, fleet, policies)
    contents["simulation"]["warmup_s"] = 0.0
    contents["workload"] |= {
        "surges": [{"from_s": SURGE_S[0], "to_s": SURGE_S[1], "factor": factor}],
        "tiers": [
            {"tier": 0, "share": 0.42, "ttft_s": 1},
            {"tier": 1, "share": 0.30, "ttft_s": NORMAL_TTFT_S},
            {"tier": 2, "share": 0.28, "deadline_after_s": 86400},
        ],
    }
    return contents


def overload(seed: int) -> Measurement:
    """The factor at which FCFS makes as many requests late as in the paper. It varies with the seed, because an hour's
    load does."""
    low, high = SEARCHED
    for _ in range(MOST_TRIALS):
        factor = sqrt(low * high)
        chosen = scenario.assemble(copy.deepcopy(document("fcfs", factor)) | {"seed": seed}, Places(), Path())
        late = measure(scenario.Simulator().records(chosen), 0.0)["violations"]["0"]
        if abs(late - LATE) <= NEAR:
            break
        low, high = (factor, high) if late < LATE else (low, factor)
    return {"factor": factor}


def measure(records: Records, _: float) -> Measurement:
    """Maps each interactive tier to the share of late first tokens, and third quartile of TTFT."""
    measured: Measurement = {"violations": {}, "q3_s": {}}
    for tier in range(BATCH):
        wait_s, limit_s = waits(records, LLAMA_2, 0.0, records.end_s, tier)
        measured["violations"][str(tier)] = float((wait_s > limit_s).mean())
        measured["q3_s"][str(tier)] = float(np.percentile(wait_s, 75))
    return measured
