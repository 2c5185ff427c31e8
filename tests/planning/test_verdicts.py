"""Runs that end when a missed target is certain: the verdict is that of the whole run, in every case."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from headway.config.scenario import assemble
from headway.config.strict_yaml import Places
from headway.core.record import Records
from headway.metrics.latency import DefaultSlo
from headway.planning.capacity.problem import RehearsalMetrics, Targets, misses
from headway.planning.capacity.rehearsal import rehearsal
from headway.planning.rehearsals import Watch
from headway.planning.verdicts import watched
from headway.scenario import Simulator
from headway.workload.generate import build
from headway.workload.spec import WorkloadSpec

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "acceptance": 0.5}
ENGINES: list[dict[str, Any]] = [{}, {}, {"engine": "sglang"}, {"speculative": DRAFTS}]


def _document(draw: Random) -> dict[str, Any]:
    """A small fleet, too small for its requests more often than not, some of which give up, or have SLOs."""
    workload: dict[str, Any] = {
        "num_requests": draw.choice([1, 2, 40, 90]),
        "arrivals": draw.choice([5.0, 20.0, 60.0]),
        "prompt_tokens": {"kind": "lognormal", "mean": 1500, "cv": 1},
        "output_tokens": draw.choice([1, 30, 120]),
    }
    if draw.random() < 0.4:
        workload["tiers"] = [{"tier": 0, "ttft_s": 0.3}, {"tier": 1, "e2e_s": 4.0}, {"tier": 2}]
    if draw.random() < 0.3:
        workload["timeout_s"] = 1.0
    pool: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "l4", "kv_capacity_tokens": 9000}
    slo = {} if draw.random() < 0.4 else {"ttft_s": draw.choice([0.2, 1.0]), "tpot_s": 0.08}
    warmup_s = draw.choice([0.0, 0.5]) if workload["num_requests"] > 2 else 0.0  # some request must be measured
    simulation = {"warmup_s": warmup_s} | ({"until_s": 2.0} if draw.random() < 0.2 else {})
    fleet: dict[str, Any] = {"fleet": [{**pool, "replicas": draw.choice([1, 2]), **draw.choice(ENGINES)}]}
    if draw.random() < 0.3:
        handover = {"first_token": draw.choice(["prefill", "sent", "decode"])}
        fleet = {"fleet": [], "combos": [{"name": "pair", "prefill": pool, "decode": pool, "handover": handover}]}
    return {"workload": workload, **fleet, "slo": slo, "simulation": simulation, "seed": draw.randrange(9)}


def _targets_near(found: RehearsalMetrics, draw: Random) -> Targets:
    """Targets that are met by a hair or missed by one, and others."""
    kinds = ("ttft_p99_s", "tpot_p99_s", "e2e_p99_s", "attainment")
    values = {name: value for name in kinds if (value := getattr(found, name)) is not None}
    chosen = {name: value * draw.choice([0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 2.0]) for name, value in values.items()}
    some = {name: value for name, value in chosen.items() if draw.random() < 0.6 and value > 0}
    return Targets(**(some or {"ttft_p99_s": draw.choice([0.1, 1.0, 10.0])}))


@pytest.mark.ci
def test_the_verdict_is_that_of_the_whole_run() -> None:
    draw, num_early, num_met = Random(5), 0, 0
    for _ in range(60):
        scenario = assemble(_document(draw), Places(), Path())
        whole = rehearsal(scenario, Targets(), stops=False).simulated(Simulator())
        for _ in range(3):
            targets = _targets_near(whole, draw)
            found = rehearsal(scenario, targets, stops=True).simulated(Simulator())
            if found.is_stopped:
                num_early += 1
                assert misses(whole, targets)
            else:
                num_met += not misses(whole, targets)
                assert found == whole
    assert num_early > 40 and num_met > 20


class Counted:
    """A source that counts the reported ends, and passes them on or not."""

    reactive = True

    def __init__(self, source: Any, passes: bool) -> None:
        self.source, self.passes, self.num_ended = source, passes, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def ended(self, *given: Any) -> None:
        self.num_ended += 1
        if self.passes:
            self.source.ended(*given)


class Counting(Simulator):
    """A simulator that counts the ends of its last run."""

    def __init__(self, passes: bool = True) -> None:
        self.passes = passes
        self.source: Any = None

    def records(self, scenario: Any, watch: Watch | None = None) -> Records:
        assert watch is not None
        self.source = Counted(watch(build(scenario.spec.workload, 0)), self.passes)
        return super().records(scenario, lambda _: self.source)


def test_a_run_that_must_miss_ends_early() -> None:
    document = {
        "workload": {"num_requests": 400, "arrivals": 200, "prompt_tokens": 2000, "output_tokens": 50},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "l4", "replicas": 1}],
    }
    scenario, targets, simulator = assemble(document, Places(), Path()), Targets(ttft_p99_s=0.2), Counting()
    assert rehearsal(scenario, targets, stops=True).simulated(simulator).is_stopped
    assert simulator.source.num_ended < 40
    assert rehearsal(scenario, targets, stops=False).simulated(Simulator()).num_requests == 400


@pytest.mark.parametrize("targets", [Targets(ttft_p99_s=1.0), Targets(attainment=0.9)])
def test_requests_that_wait_too_long_are_late_before_they_end(targets: Targets) -> None:
    document = {
        "workload": {"num_requests": 60, "arrivals": 10, "prompt_tokens": 2000, "output_tokens": 1500},
        "fleet": [{"model": "llama-3.1-8b", "gpu": "l4", "kv_capacity_tokens": 9000}],
        "slo": {"ttft_s": 1.0},
    }
    scenario = assemble(document, Places(), Path())
    assert rehearsal(scenario, targets, stops=True).simulated(Counting(passes=False)).is_stopped
    assert misses(rehearsal(scenario, targets, stops=False).simulated(Simulator()), targets)


def test_sources_that_react_are_not_watched() -> None:
    spec = WorkloadSpec(num_requests=5, prompt_tokens=10, output_tokens=5, concurrency=2)
    source = build(spec, 0)
    assert watched(source, {"ttft": (0.99, 1e-9)}, None, 0.0, DefaultSlo()) is source
