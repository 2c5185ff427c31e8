# ruff: noqa: T201 (a script prints)
"""Scalers on the seven days of SageServe's published week, with intervals; and on steps, ramps and spikes of demand.

    python bench/scaling_week.py [--sets week,shapes] [--days 0,1,2,3,4,5,6] [--hours 8-14] [--startup-s 60,155,600]
                                 [--seed 0] [--seeds 5] [--jobs 1] [--json FILE]

The week: these hours of each day are a run of their own of examples/thursday.yaml's fleet, the first hour aside, with
every scaler's settings and the clairvoyant plans. A row is a setting of Headway's scaler over all days: GPU-hours,
the share of late requests, whether no setting of another scaler has both fewer GPU-hours and fewer late requests over
the week, and GPU-hours over those of the others where they are as seldom late over the week, with 95% jackknife
intervals over the days. Needs HEADWAY_DATA.

The shapes: demand that changes in steps of 1 to 30 start times, in ramps, and in spikes of two start times, whose start
time is the first of `--startup-s`. Headway's settings, and those of HPA that are not beaten, by the same measures over
`--seeds` seeds: means, and intervals over the seeds. Runs are cached one by one in out/scaling-week, so that an
interrupted bench goes on.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import structs

from headway.config.scenario import read
from headway.config.strict_yaml import Places
from headway.metrics.interval import interval
from headway.planning.rehearsals import Resources
from headway.planning.scaling.plan import (
    ScalerResult,
    ScalingOptions,
    StartUpPlan,
    hours_at,
    is_on_frontier,
    plan,
)
from headway.scenario import Scenario, Simulator
from headway.scenario.run import assemble

ROOT = Path(__file__).parents[1]
LOW_RPS, HIGH_RPS, SPIKE_RPS = 0.5, 4.0, 6.0
"""One replica of the shapes' fleet serves about one request per second in time."""


def _steps(num: int, cycles: int) -> list[float]:
    return ([LOW_RPS] * num + [HIGH_RPS] * num) * cycles + [LOW_RPS] * num


_RISE = [LOW_RPS + (HIGH_RPS - LOW_RPS) * i / 30 for i in range(30)]
SHAPES: dict[str, list[float]] = {
    "steps of 1": _steps(1, 20), "steps of 3": _steps(3, 8), "steps of 10": _steps(10, 3), "steps of 30": _steps(30, 1),
    "ramps of 30": [*_RISE, *_RISE[::-1]] * 2,
    "spikes of 2": ([LOW_RPS] * 23 + [SPIKE_RPS] * 2) * 3 + [LOW_RPS] * 10,
}  # fmt: skip
"""Requests per second, a start time each."""
SCALERS = ("headway", "hpa", "lt-i")
OTHERS = ("HPA", "LT-I", "clairvoyant")


def document(day: int, from_hour: int, to_hour: int) -> dict[str, Any]:
    """The scenario of these hours of one day, its demand read from the data's folder."""
    duration_s = 3600 * (to_hour - from_hour)
    made, _ = read(ROOT / "examples" / "thursday.yaml")
    found = msgspec.to_builtins(made)
    found["name"] = f"day-{day}"
    found["workload"] |= {"start_hour": 24 * day + from_hour, "duration_s": duration_s}
    found["workload"]["demand"]["path"] = str(
        Path(os.environ["HEADWAY_DATA"]) / "demand" / "o365_prompt_tokens_per_minute.csv.gz"
    )
    found["simulation"]["until_s"] = duration_s
    return found


def assembled(document: Mapping[str, Any]) -> Scenario:
    return assemble(document, Places(), ROOT)


def planned(day: int, hours: tuple[int, int], startup_s: float, pool: Executor | None, seed: int) -> StartUpPlan:
    made = document(day, *hours) | {"seed": seed}
    options = ScalingOptions(scalers=SCALERS, startup_s=(startup_s,), max_late=0.99)
    folder = ROOT / "out" / "scaling-week"
    answer = plan(made, options, assembled, Resources(Simulator(), folder, pool=pool))
    return answer.plans[0]


def shaped(name: str, startup_s: float, pool: Executor | None, seed: int, num_seeds: int) -> list[ScalerResult]:
    """All settings on one shape, as means over the seeds."""
    rates, duration_s = SHAPES[name], startup_s * len(SHAPES[name])
    made = {
        "name": name, "seed": seed,
        "workload": {
            "prompt_tokens": {"kind": "lognormal", "mean": 3000, "cv": 0.4, "max": 8000},
            "output_tokens": {"kind": "lognormal", "mean": 300, "cv": 1},
            "arrivals": {"kind": "curve", "step_s": startup_s, "rates": rates}, "duration_s": duration_s,
        },
        "fleet": [{"model": "llama-3.1-70b", "gpu": "a100-80gb", "tp": 4, "engine": "vllm-0.15", "max_replicas": 10}],
        "slo": {"ttft_s": 4}, "policies": {"routing": "least-loaded"}, "simulation": {"until_s": duration_s},
    }  # fmt: skip
    options = ScalingOptions(
        scalers=SCALERS[:2], startup_s=(startup_s,), max_late=0.99, clairvoyant=False, num_seeds=num_seeds
    )
    folder = ROOT / "out" / "scaling-week"
    answer = plan(made, options, assembled, Resources(Simulator(), folder, pool=pool))
    return list(answer.plans[0].results)


def over_days(plans: list[StartUpPlan]) -> list[ScalerResult]:
    """Each setting over all days, a day in place of a seed."""
    found = []
    for same in zip(*([*each.results, *each.clairvoyant] for each in plans), strict=True):
        starts = fmean(each.starts for each in same)
        days = tuple(each.by_seed[0] for each in same)
        found.append(whole(structs.replace(same[0], starts=starts, by_seed=days)))
    return found


def whole(each: ScalerResult) -> ScalerResult:
    """With the GPU-hours of its days added, and the share of all their late requests."""
    num = sum(day.num_requests for day in each.by_seed)
    late = sum(day.late * day.num_requests for day in each.by_seed) / num
    return structs.replace(each, gpu_hours=sum(day.gpu_hours for day in each.by_seed), late=late)


def ratio(own: ScalerResult, others: list[ScalerResult]) -> float | None:
    """GPU-hours over those of a family where it is as seldom late over all days. None if it is always later."""
    hours = hours_at(others, own.late)
    return own.gpu_hours / hours if hours else None


def jackknife(own: ScalerResult, others: list[ScalerResult]) -> tuple[float, float] | None:
    """The interval of `ratio`, by leaving out one day in turn. None if it cannot be compared without some day."""

    def without(each: ScalerResult, day: int) -> ScalerResult:
        return whole(structs.replace(each, by_seed=each.by_seed[:day] + each.by_seed[day + 1 :]))

    num, point = len(own.by_seed), ratio(own, others)
    if num < 2 or point is None:
        return None
    left = [ratio(without(own, day), [without(each, day) for each in others]) for day in range(num)]
    if None in left:
        return None
    return interval([num * point - (num - 1) * each for each in left if each is not None])


def shown(own: ScalerResult, others: list[ScalerResult]) -> str:
    point, between = ratio(own, others), jackknife(own, others)
    if point is None:
        return "-"
    return f"{point:.2f}" + ("" if between is None else f" [{between[0]:.2f}, {between[1]:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="week,shapes")
    parser.add_argument("--days", default="0,1,2,3,4,5,6")
    parser.add_argument("--hours", default="8-14")
    parser.add_argument("--startup-s", default="60,155,600")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    days, starts = ([*map(kind, text.split(","))] for kind, text in ((int, options.days), (float, options.startup_s)))
    first, last = map(int, options.hours.split("-"))
    found: dict[str, list[ScalerResult]] = {}
    with ProcessPoolExecutor(options.jobs) if options.jobs > 1 else nullcontext() as pool:
        if "week" in options.sets.split(","):
            show_heads("starts", OTHERS)
            for startup_s in starts:
                run = partial(planned, hours=(first, last), startup_s=startup_s, pool=pool, seed=options.seed)
                found[f"{startup_s:g} s"] = over_days([run(day) for day in days])
                show(f"{startup_s:g} s", found[f"{startup_s:g} s"], OTHERS)
        if "shapes" in options.sets.split(","):
            show_heads("demand", OTHERS[:1], "setting")
            for name in SHAPES:
                found[name] = shaped(name, starts[0], pool, options.seed, options.seeds)
                show(name, found[name], OTHERS[:1], ("headway", "HPA"))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(found))


def show_heads(first: str, others: tuple[str, ...], setting: str = "Headway's setting") -> None:
    heads = (first, setting, "GPU-hours", "late", "on the frontier", *(f"over {each}" for each in others))
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")


def show(
    name: str, results: list[ScalerResult], others: tuple[str, ...], families: tuple[str, ...] = ("headway",)
) -> None:  # fmt: skip
    """A row for each setting of Headway's, and for those of other families that are on the frontier."""
    real = [each for each in results if not each.is_oracle]
    for own in (each for each in real if each.family in families):
        ratios = [shown(own, [each for each in results if each.family == family]) for family in others]
        mark = "yes" if is_on_frontier(own, real) else "no"
        if own.family != "headway":
            if mark == "no":
                continue
            ratios = ["" for _ in others]
        setting = own.setting if families == ("headway",) else f"{own.family}, {own.setting}"
        print(f"| {name} | {setting} | {own.gpu_hours:,.0f} | {own.late:.1%} | {mark} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
