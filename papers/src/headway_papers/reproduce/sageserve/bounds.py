"""A lower bound on the cost of any plan for a trace and fleet, and the best plan that knows the trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from headway import scenario
from headway.config.fleet import coefficients_of
from headway.config.strict_yaml import Places
from headway.core.fleet import Pool
from headway.core.record import Records
from headway.perf.speculation import AnyStepModel, step_model
from headway.planning.gpu_hours_bound import gpu_hours_bound
from headway.planning.scaling.timetable import best_timetable
from headway.workload.generate import generate
from headway_papers.reproduce.sageserve import measures
from headway_papers.reproduce.sageserve.scenes import GPUS
from headway_papers.reproduce.tasks import Measurement


def bound(document: Mapping[str, Any], seed: int, data: str = "") -> Measurement:
    """A lower bound on the instance-hours of a scenario with one model (`planning.gpu_hours_bound`). `data`: the folder
    of its files."""
    chosen = scenario.assemble(dict(document), Places(), Path(data))
    table = generate(chosen.spec.workload, seed, Path(data))
    until_s, warmup_s = document["simulation"]["until_s"], document["simulation"]["warmup_s"]
    records = Records(table.columns, table.models, table.regions, {}, {}, {}, (), until_s)
    coefficients = coefficients_of(chosen.spec, chosen.fleet, Path(), Places())

    def steps(pool: Pool) -> AnyStepModel:
        return step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients[pool.name])

    gpu_hours = gpu_hours_bound(chosen.fleet, records, steps, warmup_s=warmup_s, to_the_end=False)
    (model,) = table.models
    return {"instance_hours": None if gpu_hours is None else gpu_hours / GPUS[model]}


def best(document: Mapping[str, Any], seed: int, tps: Mapping[str, float], data: str = "") -> Measurement:
    """The best timetable for a known trace, measured like a strategy; empty if none meets the SLOs."""
    chosen = scenario.assemble({**document, "seed": seed}, Places(), Path(data))
    timetable = best_timetable(chosen, scenario.Simulator(), tps)
    if timetable is None:
        return {}
    policies = structs.replace(chosen.spec.policies, scaling=timetable.scaler)
    again = replace(chosen, spec=structs.replace(chosen.spec, policies=policies))
    return measures.measure(scenario.Simulator().records(again), document["simulation"]["warmup_s"])
