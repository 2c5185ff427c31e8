"""A small system to reproduce: two fleets on the same requests, a planner's call, one row of every kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.report.run import Run
from headway_papers.reproduce import charts
from headway_papers.reproduce.abstract import Reading, Sentence
from headway_papers.reproduce.claims import AtLeast, AtMost, Between, Claim, EverySeed
from headway_papers.reproduce.findings import Figure, Finding, Findings, PaperTable
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, SimulationTask

TITLE = "Tiny: <Twice> the Replicas & Half the Wait"
SEEDS = 4
QUICK_SEEDS = 2
CLAIMS = (
    Claim("ttft", "Two replicas lower TTFT p99 by 90%.", "90%", AtLeast(0.9, unit="%")),
    Claim("speed-up", "E2E is three times as fast.", "3x", AtLeast(3.0, neutral=1.0, unit="x")),
    Claim("tpot", "TPOT falls to 0.1 of what it was.", "0.1x", AtMost(0.1, neutral=1.0, unit="x")),
    Claim("tokens", "Both generate the same tokens.", "equal", Between(-0.03, 0.03, unit="%")),
    Claim("order", "Two replicas are never slower.", "always", EverySeed()),
    Claim("plan", "The plan takes 12 GPUs.", 12, Between(12, 12, exact=True)),
)
ABSTRACT = (
    Sentence(
        "Twice the replicas halve the wait.",
        (
            Reading("speed-up", "mean E2E", "before"),
            Reading("tpot", "time per <token>", "after"),
        ),
        "A load at which requests wait.",
    ),
    Sentence("It costs 12 GPUs.", (Reading("plan", "the plan", "before"),), "A larger demand."),
)


def run(runner: Runner) -> Findings:
    """As a system does it."""
    num_requests = 40 if runner.quick else 80
    tasks = {
        (replicas, seed): SimulationTask(document(replicas, num_requests), seed, measure)
        for replicas in (1, 2)
        for seed in runner.seeds
    }
    found = runner.run(tasks)
    planned = runner.run({"plan": Call(plan, {"demand": [5, 7]})})["plan"]["gpus"]
    pairs = [(found[1, seed], found[2, seed]) for seed in runner.seeds]
    cut = [1 - two["ttft_p99_s"] / one["ttft_p99_s"] for one, two in pairs]
    outcomes = {
        "ttft": Finding(cut, "Queues are short here."),
        "speed-up": Finding([one["e2e_s"] / two["e2e_s"] for one, two in pairs], "Decoding takes as long as before."),
        "tpot": Finding([two["tpot_s"] / one["tpot_s"] for one, two in pairs], "A half-empty batch is hardly faster."),
        "tokens": Finding([two["tokens"] / one["tokens"] - 1 for one, two in pairs], ""),
        "order": Finding([two["e2e_s"] <= one["e2e_s"] for one, two in pairs], ""),
        "plan": Finding([planned], "5 and 7."),
    }
    ttft = {f"{n} replicas": [(40.0, [found[n, s]["ttft_p99_s"] for s in runner.seeds])] for n in (1, 2)}
    cuts = {"two replicas": [cut]}
    figures = [
        Figure("Figure 1", "TTFT </script>", "Lower is better.", charts.curves(ttft, "requests/s", "TTFT p99 (s)")),
        Figure("Figure 2", "The cut", "By how much TTFT falls.", charts.bars(["TTFT"], cuts, "cut")),
        Figure("Figure 3", "E2E", "Of seed 0.", charts.distributions({"two": found[2, 0]["e2e_values_s"]}, "E2E (s)")),
    ]
    table = PaperTable("Table 1", "GPUs", "What was planned.", ["demand", "GPUs"], [["both", planned], ["none", None]])
    return Findings(outcomes, (*figures, table))


def document(replicas: int, num_requests: int) -> dict[str, Any]:
    """A scenario."""
    workload = {"num_requests": num_requests, "arrivals": 40.0, "prompt_tokens": 500, "output_tokens": "azure-conv"}
    return {"workload": workload, "fleet": [{"model": "llama-3.1-8b", "gpu": "a100-80gb", "replicas": replicas}]}


def measure(run: Run) -> dict[str, Any]:
    """What the claims need of a run."""
    metrics = run.summary
    assert metrics.ttft_s and metrics.tpot_s and metrics.e2e_s
    return {
        "ttft_p99_s": metrics.ttft_s.p99,
        "tpot_s": metrics.tpot_s.mean,
        "e2e_s": np.float64(metrics.e2e_s.mean),
        "tokens": np.int64(metrics.output_tokens),
        "e2e_values_s": np.linspace(metrics.e2e_s.p50, metrics.e2e_s.p99, 20),
        "never": float("nan"),
    }


def plan(demand: list[int]) -> dict[str, Any]:
    """What a planner would say."""
    return {"gpus": sum(demand)}


def interrupted(number: int, marker: str) -> dict[str, Any]:
    """Fails for 2, until there is such a folder."""
    if number == 2 and not Path(marker).exists():
        raise HeadwayError("no such luck")
    return {"number": number}


def dies() -> dict[str, Any]:
    """As a process does that the kernel ends."""
    os._exit(1)
