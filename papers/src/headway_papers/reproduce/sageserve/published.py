"""Whole days: the published Thursday, as the paper measured its headline; November's; and four models on equal GPUs.

The demand is the artifact's own series of prompt tokens per minute (`demand/o365_prompt_tokens_per_minute.csv.gz` of
the data folder); without the file, it is the built-in week's Thursday, and the findings say so. As in the paper (7.1),
every model takes the same number of GPUs, so that an instance of one model can be redeployed for another, and starts
come from three sources: a spot instance of the same model, one of another model after ten minutes, and one whose
weights are not in the region after two hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from headway.workload.spec import WorkloadSpec, resolved
from headway_papers.reproduce.sageserve.scenes import (
    A100,
    BLOOM,
    JULY,
    JULY_SCOUT,
    KV_TOKENS,
    LEAST,
    LLAMA_2,
    LLAMA_31,
    LLAMA_32,
    LOAD,
    LT_I,
    MODELS,
    POOLS,
    REACTIVE,
    REACTIVE_50,
    REGIONS,
    SCOUT,
    START,
    THURSDAY,
    Document,
    Scene,
    mixed,
    policies_of,
)

SERIES = "demand/o365_prompt_tokens_per_minute.csv.gz"
"""File in the data folder: seven days from a Monday."""
SERIES_THURSDAY = 72.0
WARMUP_S = 7200.0
MOST = 60
"""Maximum number of instances of a model in a region; in practice the GPU limit decides."""
STEP_S, PEAK_S = 3600.0, 900.0
"""Forecasts are of an hour's maximum (6.3), in windows of a quarter of an hour (5)."""
PAST_HOURS = 70.0
"""Hours from the series' beginning on Monday to the run's start on Wednesday at 22:00."""
FLEET_GPUS = 8
"""GPUs of an instance of any model: "we set the GPU cards needed by each model as identical" (7.1). Bloom needs
eight."""
ARTIFACT_TPS: Mapping[str, float] = {
    LLAMA_2: 30 * 7516.67 / 60,
    BLOOM: 30 * 5398.07 / 60,
    LLAMA_31: 30 * 1.6e6 / 60,
    LLAMA_32: 30 * 1.6e6 / 60,
}
"""theta in the artifact, in input tokens per second. The series are scaled by our theta over this one, so that the
number of needed instances equals the paper's, whatever an instance serves."""
NAMES: Mapping[str, str] = {LLAMA_2: "A", BLOOM: "B", LLAMA_31: "C", LLAMA_32: "D"}
INTERACTIVE: Mapping[str, tuple[float, float, float]] = {
    LLAMA_2: (0.52, 0.21, 0.27),
    BLOOM: (0.28, 0.40, 0.32),
    LLAMA_31: (0.38, 0.32, 0.30),
    LLAMA_32: (0.38, 0.34, 0.28),
}
"""Interactive shares by region. Llama-2's come from the paper (3), the others from the built-in week."""
BATCH: Mapping[str, tuple[float, float, float]] = {
    LLAMA_2: (0.63, 0.35, 0.02),
    BLOOM: (0.53, 0.45, 0.02),
    LLAMA_31: (0.35, 0.63, 0.02),
    LLAMA_32: (0.59, 0.39, 0.02),
}
TIERS = [{"tier": 0, "share": 0.9, "ttft_s": 1}, {"tier": 2, "share": 0.1, "deadline_after_s": 86400}]
"""The series distinguish only interactive and batch work, and give both rates; the limits are the paper's (2.2)."""
SPIN_UP_S = 155.0
"""The artifact's start time of an instance."""
DELAYS_S = (60.0, SPIN_UP_S, 600.0)
"""Start times: the paper's median to reclaim a spot instance, the artifact's `spin_up`, and the paper's
redeployment."""
REDEPLOY_S, REMOTE_S = 600.0, 7200.0
ARTIFACT_PLAN: Mapping[str, float] = {"step_s": 1200.0, "lead_s": 1200.0}
"""The artifact plans for the largest forecast of 20 to 60 minutes ahead."""
ARTIFACT_MEMORY: Mapping[str, float] = {"out_above": 0.5, "in_below": 0.25, "cooldown_s": SPIN_UP_S}
"""The artifact grows above 50% of memory in use, shrinks below 25%, and takes no step while an instance starts. The
paper has 70% and 30%, and 15 s."""


@dataclass(frozen=True)
class Day:
    """A day of the published demand."""

    theta: Mapping[str, float] = field(default_factory=dict)
    """Planned input tokens per second of an instance, by model."""
    half: Mapping[str, float] = field(default_factory=dict)
    """Maps each model to half of an instance's highest rate, which is the artifact's theta and the scale of the
    demand."""
    models: tuple[str, ...] = (LLAMA_2,)
    num_gpus: int = 4
    """GPUs of an instance of any model."""
    start_s: float = SPIN_UP_S
    """Time to start an instance on GPUs that held the same model or none."""
    from_hour: float = -2.0
    """Hour of Thursday. The first two hours do not count: the initial fleet shrinks, and the first plan appears."""
    hours: float = 26.0
    has_series: bool = True
    """Whether the published series exist; otherwise a built-in week's Thursday is used."""
    builtin: str = JULY
    """The week used without the series."""
    load: float = 1.0
    """Additional factor on `LOAD`, for a built-in week."""
    gpu: str = A100
    batch_share: float | None = None
    """Share of batch requests in a built-in week; interactive requests stay unchanged. None: as in the week."""


FLEET_DAY = Day(models=MODELS, num_gpus=FLEET_GPUS)
"""Four models on equal GPUs."""
OTHER_BLOOM_DAY = replace(FLEET_DAY, from_hour=8.0, hours=6.0)
"""The morning rise from 10:00 to 14:00, for other readings of Bloom's demand, because eight whole days of the fleet
take too long."""
SCOUT_DAY = Day(
    models=(*MODELS, SCOUT),
    num_gpus=FLEET_GPUS,
    from_hour=6.0,
    hours=10.0,
    has_series=False,
    builtin=JULY_SCOUT,
    load=2.0,
)
"""Five models on equal GPUs, from 8:00 to 16:00. An instance has twice the GPUs that `LOAD` was chosen for."""


def fleet_trial() -> Document:
    """A scenario to measure the rates of `SCOUT_DAY`'s instances, which also apply to `FLEET_DAY`."""
    unplanned = dict.fromkeys(SCOUT_DAY.models, 1.0)
    return document(replace(SCOUT_DAY, theta=unplanned, from_hour=12.0, hours=3.0, load=1.0), REACTIVE)


def has_series(folder: Path | None) -> bool:
    return folder is not None and (folder / SERIES).is_file()


def document(day: Day, strategy: str) -> Document:
    policies = policies_of(Scene(theta=day.theta, models=day.models), strategy)
    if "plan" in policies["scaling"]:
        policies["scaling"]["forecaster"]["past_hours"] = PAST_HOURS
        policies["scaling"]["plan"] |= {"step_s": STEP_S, "peak_s": PEAK_S, "startup_s": day.start_s}
    count = START * day.num_gpus * len(day.models)
    return {
        "workload": _workload(day),
        "fleet": _fleet(day, strategy),
        "policies": policies,
        "gpu_limits": [{"region": region, "gpu": day.gpu, "count": count} for region in REGIONS],
        "network": {"inter_region_s": 0.05},
        "provisioning": {
            "reclaim_s": day.start_s,
            "redeploy_s": REDEPLOY_S,
            "acquire_s": REDEPLOY_S,
            "remote_s": REMOTE_S,
        },
        "simulation": {"until_s": day.hours * 3600, "warmup_s": WARMUP_S},
    }


def with_artifacts_constants(day: Day, strategy: str) -> Document:
    """A day with the artifact's constants for plans and memory. Forecasts are of 20-minute means."""
    contents = document(day, REACTIVE if strategy == REACTIVE_50 else strategy)
    scaling = contents["policies"]["scaling"]
    if "plan" in scaling:
        del scaling["plan"]["peak_s"]
        scaling["plan"] |= ARTIFACT_PLAN
    if strategy != LT_I:  # LT-I ignores memory
        scaling |= ARTIFACT_MEMORY
    return contents


def without_bloom(day: Day) -> Day:
    return replace(day, models=tuple(model for model in day.models if model != BLOOM))


def _fleet(day: Day, strategy: str) -> list[Document]:
    return [
        {
            "name": f"{region}-{model}{suffix}",
            "model": model,
            "gpu": day.gpu,
            "tp": day.num_gpus,
            "region": region,
            "replicas": num,
            "min_replicas": LEAST,
            "max_replicas": MOST,
            "kv_capacity_tokens": KV_TOKENS[model],
            "engine": "simulated-0.15",
        }
        for model in day.models
        for region in REGIONS
        for suffix, num in POOLS.get(strategy, {"": START}).items()
    ]


def _workload(day: Day) -> Document:
    common: Document = {"duration_s": day.hours * 3600}
    if not day.has_series:
        return common | _built_in(day)
    series: dict[str, Any] = {}
    for model in day.models:
        name = NAMES[model]
        for kind, tier, shares in (("prod", 0, INTERACTIVE[model]), ("dev", 2, BATCH[model])):
            regions = dict(zip(REGIONS, shares, strict=True))
            series[f"{name} {kind}"] = {"model": model, "tier": tier, "regions": regions}
    lengths = {model: each for model, each in _lengths().items() if model in day.models}
    demand = {"path": SERIES, "per_s": 60, "series": series, "lengths": lengths}
    loads = {model: day.half[model] / ARTIFACT_TPS[model] for model in day.models}
    start_hour = SERIES_THURSDAY + day.from_hour
    return common | {"start_hour": start_hour, "models": loads, "demand": demand, "tiers": TIERS}


def _built_in(day: Day) -> Document:
    loads = {model: LOAD[model] for model in day.models}
    week: Document = {
        "builtin": day.builtin,
        "models": loads,
        "start_hour": THURSDAY + day.from_hour,
        "scale": day.load,
    }
    if day.batch_share is not None:
        week |= mixed(day.batch_share, day.load)
    return week


def _lengths() -> Document:
    """Lengths of the built-in week. The paper shows distributions of lengths (Fig. 10); the artifact has none."""
    spec = resolved(WorkloadSpec(builtin=JULY))
    assert spec.demand is not None
    lengths: Document = msgspec.to_builtins(spec.demand.lengths)
    return lengths
