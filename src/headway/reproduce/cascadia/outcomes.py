"""Values for every claim, with reasons, and the paper's figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.cascadia import claims, runs
from headway.reproduce.cascadia.claims import CASES, LLAMA
from headway.reproduce.experiment import Experiment
from headway.reproduce.findings import Figure, Findings, Outcome, Table
from headway.reproduce.tasks import Call, Measurement

Case = tuple[str, int, float]
SYSTEMS = ("cascadia", "stand-alone", "cascade-serve")
ABLATIONS = ("uniform parallelism", "uniform allocation")
ROWS = 16
"""Requests that exhaustive search plans for."""


def found(experiment: Experiment) -> Findings:
    """Outcomes and exhibits of the parts that are wanted."""
    outcomes: dict[str, Outcome] = {}
    exhibits: list[Figure | Table] = []
    wants_cases = experiment.wants(*_ids(claims.END_TO_END + claims.JUDGE + claims.SARATHI))
    if wants_cases:
        cases, rates = _measured(experiment, CASES)
        outcomes |= _end_to_end(cases, experiment.seeds)
        exhibits += _exhibits(cases, rates)
        if experiment.wants("sarathi"):
            outcomes["sarathi"] = _sarathi(experiment, cases, rates)
    if experiment.wants(*_ids(claims.FIGURE_7)):
        outcomes["slo-llama"] = _times(_measured(experiment, LLAMA)[0], "stand-alone", "p95_s")
    if experiment.wants(*_ids(claims.OPTIMALITY)):
        outcomes |= _optimality(experiment)
    return Findings(outcomes, exhibits)


def _ids(of: Sequence[Any]) -> Iterator[str]:
    return (claim.id for claim in of)


def _measured(
    experiment: Experiment, cases: Sequence[Case]
) -> tuple[dict[Case, Measurement], dict[tuple[str, int], Measurement]]:
    """Every case, at the rate of its trace."""
    pairs = {(cascade, trace) for cascade, trace, _ in cases}
    quick, seeds = experiment.quick, list(experiment.seeds)
    rates = experiment.run(
        {
            (cascade, trace): Call(runs.rate, {"cascade": cascade, "trace": trace, "quick": quick})
            for cascade, trace in sorted(pairs)
        }
    )
    tasks = {}
    for cascade, trace, q_min in cases:
        said = {"cascade": cascade, "trace": trace, "q_min": q_min, "seeds": seeds, "quick": quick}
        tasks[cascade, trace, q_min] = Call(runs.measure, said | {"rate_rps": rates[cascade, trace]["rate_rps"]})
    return experiment.run(tasks), rates


def _end_to_end(cases: dict[Case, Measurement], seeds: Sequence[int]) -> dict[str, Outcome]:
    first = cases[CASES[0]]
    margins = {case: _of(each, "cascadia", "quality") for case, each in cases.items()}
    least = [min(values[i] - case[2] for case, values in margins.items()) for i in range(len(seeds))]
    largest = [cases[case]["plans"]["cascadia"] for case in CASES[:3]]
    none = [cases[case]["plans"]["cascadia"] for case in CASES[4:]]
    falls = [[each["ratios"][-1] for each in largest], [each["gpus"][-1] for each in largest]]
    moves = all(values[0] >= values[1] >= values[2] and values[0] > values[2] for values in falls)
    without = all(each["gpus"][-1] == 0 for each in none)
    plan_s = [each["plan_s"] for each in cases.values()]
    judged = [
        [
            1 - without_s / with_s
            for without_s, with_s in zip(each["no judge"], _of(each, "cascadia", "p95_s"), strict=True)
        ]
        for each in cases.values()
    ]
    return {
        "slo-stand-alone": _times(cases, "stand-alone", "p95_s"),
        "slo-cascade-serve": _times(cases, "cascade-serve", "p95_s"),
        "throughput-stand-alone": _times(cases, "stand-alone", "throughput_rps"),
        "throughput-cascade-serve": _times(cases, "cascade-serve", "throughput_rps"),
        "always-faster": Outcome([_always(cases, i) for i in range(len(seeds))], _by_case(cases, "p95_s")),
        "quality": Outcome(least, "; ".join(f"{_name(case)}: {fmean(v):.2f}" for case, v in margins.items()) + "."),
        "ablation-parallelism": _times(cases, ABLATIONS[0], "p95_s"),
        "ablation-allocation": _times(cases, ABLATIONS[1], "p95_s"),
        "cost-stand-alone": _saved(first, "stand-alone"),
        "cost-cascade-serve": _saved(first, "cascade-serve"),
        "plans-move": Outcome([moves] * len(seeds), f"Shares {_listed(falls[0])}, GPUs {_listed(falls[1])}."),
        "no-largest": Outcome([without] * len(seeds), f"GPUs {_listed([each['gpus'][-1] for each in none])}."),
        "plan-time": Outcome(plan_s, "A value a case, cold, on one core, with whatever else the machine was doing."),
        "judge-time": Outcome([fmean(each[i] for each in judged) for i in range(len(seeds))], "Mean over the cases."),
    }


def _of(case: Measurement, system: str, key: str) -> list[float]:
    return [run[key] for run in case["runs"][system]]


def _ratios(case: Measurement, other: str, key: str) -> list[float]:
    """By seed: how many times better than another system."""
    pairs = zip(_of(case, "cascadia", key), _of(case, other, key), strict=True)
    return [theirs / ours if key == "p95_s" else ours / theirs for ours, theirs in pairs]


def _times(cases: dict[Case, Measurement], other: str, key: str) -> Outcome:
    by_case = {case: _ratios(each, other, key) for case, each in cases.items()}
    values = [fmean(each) for each in zip(*by_case.values(), strict=True)]
    why = "; ".join(f"{_name(case)}: {fmean(each):.2f}x" for case, each in by_case.items())
    return Outcome(values, f"{why}.")


def _always(cases: dict[Case, Measurement], i: int) -> bool:
    return all(_ratios(each, other, "p95_s")[i] > 1 for each in cases.values() for other in SYSTEMS[1:])


def _by_case(cases: dict[Case, Measurement], key: str) -> str:
    parts = []
    for case, each in cases.items():
        shown = ", ".join(f"{fmean(_of(each, system, key)):.3g}" for system in SYSTEMS)
        parts.append(f"{_name(case)}: {shown}")
    return f"p95 (s) of {', '.join(SYSTEMS)}: {'; '.join(parts)}."


def _saved(case: Measurement, other: str) -> Outcome:
    """All use 32 GPUs, so that cost per request goes as one over throughput."""
    values = [1 - 1 / ratio for ratio in _ratios(case, other, "throughput_rps")]
    usd = {s: 32 * 2.67 / 3600 / fmean(_of(case, s, "throughput_rps")) for s in ("cascadia", other)}
    return Outcome(values, ", ".join(f"{name}: ${each:.6f} a request" for name, each in usd.items()) + ".")


def _sarathi(experiment: Experiment, cases: dict[Case, Measurement], rates: Any) -> Outcome:
    said = {"trace": 1, "rate_rps": rates["deepseek", 1]["rate_rps"], "seeds": list(experiment.seeds)}
    call = Call(runs.sarathi, said | {"quick": experiment.quick})
    by_chunk = experiment.run({"sarathi": call})["sarathi"]["throughput_rps"]
    best = max(by_chunk, key=lambda chunk: fmean(by_chunk[chunk]))
    ours = _of(cases[CASES[0]], "cascadia", "throughput_rps")
    values = [each / theirs for each, theirs in zip(ours, by_chunk[best], strict=True)]
    return Outcome(values, f"The best chunk is {best} tokens.")


def _optimality(experiment: Experiment) -> dict[str, Outcome]:
    rows = ROWS // 2 if experiment.quick else ROWS
    found = experiment.run(
        {("optimality", seed): Call(runs.optimality, {"seed": seed, "num_rows": rows}) for seed in experiment.seeds}
    )
    each = list(found.values())
    effort = [one["all_evaluations"] / max(one["evaluations"], 1) for one in each]
    seconds = f"{fmean(one['plan_s'] for one in each):.2g} s against {fmean(one['exhaustive_s'] for one in each):.2g} s"
    why = f"Six GPUs, {rows} requests, every threshold that makes a difference."
    return {
        "optimality": Outcome([one["gap"] for one in each], why),
        "search-effort": Outcome(effort, f"{why} {seconds}."),
    }


def _exhibits(cases: dict[Case, Measurement], rates: Any) -> list[Figure | Table]:
    names = [_name(case) for case in cases]
    lone = [rates[case[0], case[1]]["lone_s"] for case in cases]
    scales = {
        system: [[p95 / s for p95 in _of(each, system, "p95_s")] for each, s in zip(cases.values(), lone, strict=True)]
        for system in (*SYSTEMS, *ABLATIONS)
    }
    rush = {system: [_of(each, system, "throughput_rps") for each in cases.values()] for system in SYSTEMS}
    heads = ["case", "h1", "h2", "p2", "p3", "f1", "f2", "f3"]
    rows: list[list[str | float | None]] = []
    shapes: list[list[str | float | None]] = []
    for name, each in zip(names, cases.values(), strict=True):
        said = each["plans"]["cascadia"]
        rows.append([name, *said["thresholds"], *said["ratios"][1:], *said["gpus"]])
        shapes.append([name, *said["labels"]])
    return [
        Figure(
            "Figure 5",
            "SLO scale for 95% attainment",
            "Lower is better; a multiple of a lone request's mean latency on the largest model.",
            charts.bars(names, {name: scales[name] for name in SYSTEMS}, "SLO scale"),
        ),
        Figure("Figure 6", "Throughput", "All requests there at once.", charts.bars(names, rush, "requests/s")),
        Figure(
            "Figure 9",
            "Parts left out",
            "Lower is better.",
            charts.bars(names, {name: scales[name] for name in ("cascadia", *ABLATIONS)}, "SLO scale"),
        ),
        Table("Table 2", "Thresholds, shares, GPUs", "What was planned.", heads, rows),
        Table("Table 3", "Replicas", "What was planned.", ["case", "small", "middle", "large"], shapes),
    ]


def _name(case: Case) -> str:
    cascade, trace, q_min = case
    return f"({q_min:g}, {trace})" + (f" {cascade}" if cascade != "deepseek" else "")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
