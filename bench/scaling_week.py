# ruff: noqa: T201 (a script prints)
"""Scalers on the seven days of SageServe's published week, with intervals over the days.

    python bench/scaling_week.py [--days 0,1,2,3,4,5,6] [--hours 8-14] [--startup-s 60,155,600] [--jobs 1] [--json FILE]

These hours of each day are a run of their own of examples/thursday.yaml's fleet, the first hour aside, with every
scaler's settings and the clairvoyant plans. A row is a setting of Headway's scaler over all days: GPU-hours, the share
of late requests, whether no setting of another scaler has both fewer GPU-hours and fewer late requests over the week,
and GPU-hours over those of the others where they are as seldom late, paired by day. Needs HEADWAY_DATA. Runs are cached
one by one in out/scaling-week, so that an interrupted bench goes on.
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
from headway.planning.scaling.plan import (
    Comparison,
    Oracle,
    ScalerResult,
    ScalingOptions,
    StartUpPlan,
    compared,
    is_on_frontier,
    plan,
)
from headway.scenario import Scenario, Simulator
from headway.scenario.oracle_plan import served_tps, timetables
from headway.scenario.run import assemble

ROOT = Path(__file__).parents[1]
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
    answer = plan(made, options, assembled, Oracle(served_tps, timetables), Simulator(), folder, pool=pool)
    return answer.plans[0]


def over_days(plans: list[StartUpPlan]) -> list[ScalerResult]:
    """Each setting over all days, a day in place of a seed: GPU-hours added, and the share of all late requests."""
    found = []
    for same in zip(*([*each.results, *each.clairvoyant] for each in plans), strict=True):
        days = tuple(each.by_seed[0] for each in same)
        num = sum(each.num_requests for each in days)
        found.append(
            structs.replace(
                same[0],
                gpu_hours=sum(each.gpu_hours for each in days),
                late=sum(each.late * each.num_requests for each in days) / num,
                starts=fmean(each.starts for each in days),
                by_seed=days,
            )
        )
    return found


def shown(each: Comparison | None) -> str:
    if each is None:
        return "-"
    return f"{each.ratio:.2f}" + ("" if each.interval is None else " [{:.2f}, {:.2f}]".format(*each.interval))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", default="0,1,2,3,4,5,6")
    parser.add_argument("--hours", default="8-14")
    parser.add_argument("--startup-s", default="60,155,600")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    days, starts = ([*map(kind, text.split(","))] for kind, text in ((int, options.days), (float, options.startup_s)))
    first, last = map(int, options.hours.split("-"))
    weeks: dict[float, list[ScalerResult]] = {}
    with ProcessPoolExecutor(options.jobs) if options.jobs > 1 else nullcontext() as pool:
        for startup_s in starts:
            run = partial(planned, hours=(first, last), startup_s=startup_s, pool=pool, seed=options.seed)
            weeks[startup_s] = over_days([run(day) for day in days])
    print(
        "| starts | Headway's setting | GPU-hours | late | on the frontier | over HPA | over LT-I | over clairvoyant |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for startup_s, results in weeks.items():
        real = [each for each in results if not each.is_oracle]
        for own in (each for each in real if each.family == "headway"):
            ratios = [shown(compared(own, [each for each in results if each.family == family])) for family in OTHERS]
            mark = "yes" if is_on_frontier(own, real) else "no"
            print(
                f"| {startup_s:g} s | {own.setting} | {own.gpu_hours:,.0f} | {own.late:.1%} | {mark} "
                f"| {' | '.join(ratios)} |"
            )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode({f"{startup_s:g}": found for startup_s, found in weeks.items()}))


if __name__ == "__main__":
    main()
