"""SageServe: scaling LLM serving over regions by forecasts.

Claims in `claims`; fleets, strategies and what is kept of a run in `runs`; values, reasons and charts in `outcomes`.
"""

from __future__ import annotations

from typing import Any

from headway.reproduce.experiment import Experiment
from headway.reproduce.findings import Findings
from headway.reproduce.sageserve import claims, runs
from headway.reproduce.sageserve.claims import CLAIMS
from headway.reproduce.sageserve.outcomes import Outcomes
from headway.reproduce.tasks import Call, Simulation

TITLE = "SageServe: forecast-aware scaling over regions"
SEEDS, QUICK_SEEDS = 3, 2
__all__ = ["CLAIMS", "QUICK_SEEDS", "SEEDS", "TITLE", "run"]

_IDS = {
    runs.SILOED: claims.SILOS,
    runs.REACTIVE: (*claims.SILOS, *claims.HOURS, *claims.WASTE, *claims.TAILS),
    runs.CHIRON: claims.HOURS[3:],
}
_LONG_TERM = (*claims.HOURS[:3], *claims.WASTE, *claims.TAILS)
"""Which claims a strategy's day is for."""


def run(experiment: Experiment) -> Findings:
    """Only what the claims that were asked for need; the leaked forecast belongs to none, and comes with the whole."""
    hours = 2.0 if experiment.quick else 8.0
    document = runs.day(runs.REACTIVE, 1.0, 1.0)
    tps = experiment.run({"theta": Call(runs.theta, {"document": document})})["theta"]["tps"]
    tasks: dict[tuple[Any, ...], Any] = {}
    for seed in experiment.seeds:
        for strategy in _days(experiment):
            tasks["day", strategy, seed] = Simulation(runs.day(strategy, tps, hours), seed, runs.measure)
        if experiment.wants(*(claim.id for claim in claims.BURST)):
            for strategy in (runs.LT_I, runs.LT_U, runs.LT_UA):
                tasks["burst", strategy, seed] = Simulation(runs.burst(strategy, tps), seed, runs.measure_burst)
        if experiment.wants(*(claim.id for claim in claims.ORDER)):
            for name in runs.ORDERINGS:
                tasks["order", name, seed] = Simulation(runs.ordered(name), seed, runs.measure_order)
    found = Outcomes(experiment.run(tasks), experiment.seeds, tps)
    return Findings(found.outcomes(), found.exhibits())


def _days(experiment: Experiment) -> list[str]:
    if experiment.claims is None:
        return list(runs.STRATEGIES)
    chosen = [name for name, rows in _IDS.items() if experiment.wants(*(claim.id for claim in rows))]
    if experiment.wants(*(claim.id for claim in _LONG_TERM)):
        chosen += [runs.LT_I, runs.LT_U, runs.LT_UA]
    return chosen
