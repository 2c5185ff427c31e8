"""The findings of the end-to-end claims, and their figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.cascadia import claims, runs, studies
from headway.reproduce.cascadia.claims import CASES, LLAMA
from headway.reproduce.findings import Exhibit, Figure, Finding, Findings, PaperTable, Row
from headway.reproduce.results import means_by_seed, ratios, reductions
from headway.reproduce.runner import Runner
from headway.reproduce.tasks import Call, Measurement
from headway.workload.quality_traces import TABLE_2

Case = tuple[str, int, float]
SYSTEMS = ("cascadia", "stand-alone", "cascade-serve")
ABLATIONS = ("uniform parallelism", "uniform allocation")
ROWS = 16
"""Requests that exhaustive search plans for."""


def findings(runner: Runner) -> Findings:
    """The findings of the parts with a requested claim."""
    result = Findings({})
    if runner.wants(*END_TO_END):
        cases, rates = _measured(runner, CASES)
        outcomes = _end_to_end(cases, runner.seeds) | _figure_1(rates, len(runner.seeds))
        if runner.wants(*claims.SARATHI):
            outcomes |= _other_cases(runner, cases, rates)
        result += Findings(outcomes, [_exhibit_1(rates["deepseek", 1]), *_exhibits(cases, rates)])
        result += studies.of_deepseek(runner, cases, rates)
    if runner.wants(*claims.FIGURE_7, *claims.ROUTER, *claims.WEAKER, *claims.TRAINED, *claims.CACHES, *claims.REGRET):
        cases, rates = _measured(runner, LLAMA)
        result += Findings({"slo-llama": _times(cases, "stand-alone", "p95_s")}, [_exhibit_7(cases, rates)])
        result += studies.of_llama(runner, cases, rates)
    if runner.wants(*claims.OPTIMALITY):
        result += _optimality(runner)
    if runner.wants(*claims.FIGURE_2, *claims.TABLE_1):
        result += studies.of_parts(runner)
    return Findings(result.outcomes, sorted(result.exhibits, key=_place))


END_TO_END = (
    *claims.FIGURE_1, *claims.END_TO_END, *claims.JUDGE, *claims.SARATHI, *claims.LENGTHS,
    *claims.SHAPE, *claims.SIZES, *claims.DRIFT, *claims.BUDGET, *claims.SOME,
)  # fmt: skip
"""All that need the cases of Table 2."""


def _place(exhibit: Exhibit) -> tuple[str, int]:
    """In the paper's order: figures, then tables."""
    kind, _, number = exhibit.label.partition(" ")
    return kind, int("".join(filter(str.isdigit, number)) or 99)


def _measured(
    runner: Runner, cases: Sequence[Case], ablations: bool = True
) -> tuple[dict[Case, Measurement], dict[tuple[str, int], Measurement]]:
    """Every case, at the rate of its trace."""
    pairs = {(cascade, trace) for cascade, trace, _ in cases}
    quick, seeds = runner.quick, list(runner.seeds)
    rates = runner.run(
        {
            (cascade, trace): Call(runs.rate, {"cascade": cascade, "trace": trace, "quick": quick})
            for cascade, trace in sorted(pairs)
        }
    )
    tasks = {}
    for cascade, trace, q_min in cases:
        arguments = {"cascade": cascade, "trace": trace, "q_min": q_min, "seeds": seeds, "quick": quick,
                "ablations": ablations}  # fmt: skip
        tasks[cascade, trace, q_min] = Call(runs.measure, arguments | {"rate_rps": rates[cascade, trace]["rate_rps"]})
    return runner.run(tasks), rates


def _end_to_end(cases: dict[Case, Measurement], seeds: Sequence[int]) -> dict[str, Finding]:
    first = cases[CASES[0]]
    margins = {case: _values(each, "cascadia", "quality") for case, each in cases.items()}
    least = [min(values[i] - case[2] for case, values in margins.items()) for i in range(len(seeds))]
    largest = [cases[case]["plans"]["cascadia"] for case in CASES[:3]]
    none = [cases[case]["plans"]["cascadia"] for case in CASES[4:]]
    falls = [[each["ratios"][-1] for each in largest], [each["gpus"][-1] for each in largest]]
    moves = all(values[0] >= values[1] >= values[2] and values[0] > values[2] for values in falls)
    without = all(each["gpus"][-1] == 0 for each in none)
    search_s = [each["search_s"] for each in cases.values()]
    whole_s = fmean(each["plan_s"] for each in cases.values())
    judged = [reductions(each["no judge"], _values(each, "cascadia", "p95_s")) for each in cases.values()]
    return {
        "slo-stand-alone": _times(cases, "stand-alone", "p95_s"),
        "slo-cascade-serve": _times(cases, "cascade-serve", "p95_s"),
        "throughput-stand-alone": _times(cases, "stand-alone", "throughput_rps"),
        "throughput-cascade-serve": _times(cases, "cascade-serve", "throughput_rps"),
        "always-faster": Finding([_is_always_faster(cases, i) for i in range(len(seeds))], _by_case(cases, "p95_s")),
        "quality": Finding(least, "; ".join(f"{_name(case)}: {fmean(v):.2f}" for case, v in margins.items()) + "."),
        "ablation-parallelism": _times(cases, ABLATIONS[0], "p95_s"),
        "ablation-allocation": _times(cases, ABLATIONS[1], "p95_s"),
        "cost-stand-alone": _saved({CASES[0]: first}, "stand-alone"),
        "cost-cascade-serve": _saved({CASES[0]: first}, "cascade-serve"),
        "plans-move": Finding([moves] * len(seeds), f"Shares {_listed(falls[0])}, GPUs {_listed(falls[1])}."),
        "no-largest": Finding([without] * len(seeds), f"GPUs {_listed([each['gpus'][-1] for each in none])}."),
        "plan-time": Finding(
            search_s,
            f"CPU time of each case, cold. Until a rehearsal keeps the quality: {whole_s:.3g} s on average.",
        ),
        "judge-time": Finding(means_by_seed(judged), "Mean over the cases."),
    }


def _values(case: Measurement, system: str, key: str) -> list[float]:
    return [run[key] for run in case["runs"][system]]


def _ratios(case: Measurement, other: str, key: str) -> list[float]:
    """By seed: how many times better than another system."""
    ours, theirs = _values(case, "cascadia", key), _values(case, other, key)
    return ratios(theirs, ours) if key == "p95_s" else ratios(ours, theirs)


def _times(cases: dict[Case, Measurement], other: str, key: str) -> Finding:
    by_case = {case: _ratios(each, other, key) for case, each in cases.items()}
    values = means_by_seed(by_case.values())
    why = "; ".join(f"{_name(case)}: {fmean(each):.2f}x" for case, each in by_case.items())
    return Finding(values, f"{why}.")


def _is_always_faster(cases: dict[Case, Measurement], i: int) -> bool:
    return all(_ratios(each, other, "p95_s")[i] > 1 for each in cases.values() for other in SYSTEMS[1:])


def _by_case(cases: dict[Case, Measurement], key: str) -> str:
    parts = []
    for case, each in cases.items():
        means = ", ".join(f"{fmean(_values(each, system, key)):.3g}" for system in SYSTEMS)
        parts.append(f"{_name(case)}: {means}")
    return f"p95 (s) of {', '.join(SYSTEMS)}: {'; '.join(parts)}."


def _saved(cases: dict[Case, Measurement], other: str) -> Finding:
    """All use 32 GPUs, so that cost per request goes as one over throughput."""
    saved = {case: [1 - 1 / r for r in _ratios(each, other, "throughput_rps")] for case, each in cases.items()}
    why = []
    for case, each in cases.items():
        usd = [32 * 2.67 / 3600 / fmean(_values(each, s, "throughput_rps")) for s in ("cascadia", other)]
        why.append(f"{_name(case)}: ${usd[0]:.6f} a request against ${usd[1]:.6f}")
    return Finding(means_by_seed(saved.values()), f"{'; '.join(why)}.")


def _figure_1(rates: Any, num_seeds: int) -> dict[str, Finding]:
    lone = {trace: list(each["lone"].values()) for (cascade, trace), each in rates.items() if cascade == "deepseek"}
    rises = all(a < b for each in lone.values() for pair in pairwise(each) for a, b in zip(*pair, strict=True))
    why = "; ".join(f"trace {trace}: {_listed([s for s, _ in each])} s" for trace, each in lone.items())
    return {"size-latency": Finding([rises] * num_seeds, f"A lone request on each model. {why}.")}


def _other_cases(runner: Runner, cases: dict[Case, Measurement], rates: Any) -> dict[str, Finding]:
    """What the cases of Tables 4 and 7 add."""
    added, _ = _measured(runner, claims.OTHER_CASES, ablations=False)
    all_cases = cases | added
    three = {case: all_cases[case] for case in claims.QUALITY_90}
    example = claims.OTHER_CASES[-1]
    outcomes = {
        "example-85-3": _times({example: added[example]}, "stand-alone", "p95_s"),
        "cost-stand-alone-all": _saved(three, "stand-alone"),
        "cost-cascade-serve-all": _saved(three, "cascade-serve"),
    }
    if runner.wants(*claims.SARATHI):
        outcomes |= _sarathi(runner, three, rates)
    return outcomes


def _sarathi(runner: Runner, cases: dict[Case, Measurement], rates: Any) -> dict[str, Finding]:
    arguments = {"seeds": list(runner.seeds), "quick": runner.quick}
    tasks = {
        case: Call(runs.sarathi, arguments | {"trace": case[1], "rate_rps": rates["deepseek", case[1]]["rate_rps"]})
        for case in cases
    }
    by_case, chunks = dict[Case, list[float]](), list[str]()
    for case, measured in runner.run(tasks).items():
        by_chunk = measured["throughput_rps"]
        chunks.append(max(by_chunk, key=lambda chunk: fmean(by_chunk[chunk])))
        ours = _values(cases[case], "cascadia", "throughput_rps")
        by_case[case] = ratios(ours, by_chunk[chunks[-1]])
    why = "; ".join(f"{_name(case)}: {fmean(each):.2f}x" for case, each in by_case.items())
    best = f"The best chunks are {', '.join(chunks)} tokens."
    return {
        "sarathi": Finding(by_case[CASES[0]], best),
        "sarathi-all": Finding(means_by_seed(by_case.values()), f"{why}. {best}"),
    }


def _optimality(runner: Runner) -> Findings:
    rows = ROWS // 2 if runner.quick else ROWS
    measured = runner.repeat("optimality", runs.optimality, {"num_rows": rows})
    effort = [run["all_evaluations"] / max(run["evaluations"], 1) for run in measured]
    plan_s, exhaustive_s = (fmean(run[key] for run in measured) for key in ("plan_s", "exhaustive_s"))
    why = f"Six GPUs, {rows} requests, every threshold that makes a difference."
    return Findings(
        {
            "optimality": Finding([run["gap"] for run in measured], why),
            "search-effort": Finding(effort, f"{why} {plan_s:.2g} s against {exhaustive_s:.2g} s."),
        }
    )


def _exhibit_1(rate: Measurement) -> Figure:
    lines = {name: [(lone_s, [quality])] for name, (lone_s, quality) in rate["lone"].items()}
    return Figure(
        "Figure 1", "Quality and latency of each model", "Trace 1, a lone request on the model's best shape.",
        charts.curves(lines, "mean latency (s)", "mean score"),
    )  # fmt: skip


def _exhibit_7(cases: dict[Case, Measurement], rates: Any) -> Figure:
    names, scales = [_name(case) for case in cases], _scales(cases, rates, SYSTEMS)
    return Figure(
        "Figure 7", "SLO scale with Llama models", "Lower is better.", charts.bars(names, scales, "SLO scale")
    )


def _scales(cases: dict[Case, Measurement], rates: Any, systems: Sequence[str]) -> dict[str, list[list[float]]]:
    lone = [rates[case[0], case[1]]["lone_s"] for case in cases]
    return {
        system: [
            [p95 / s for p95 in _values(each, system, "p95_s")] for each, s in zip(cases.values(), lone, strict=True)
        ]
        for system in systems
    }


def _exhibits(cases: dict[Case, Measurement], rates: Any) -> list[Exhibit]:
    names, scales = [_name(case) for case in cases], _scales(cases, rates, (*SYSTEMS, *ABLATIONS))
    rush = {system: [_values(each, system, "throughput_rps") for each in cases.values()] for system in SYSTEMS}
    ours = [each["plans"]["cascadia"] for each in cases.values()]
    paper = {(row.trace, row.q_min): row for row in TABLE_2}
    rows: list[Row] = []
    for case, plan in zip(cases, ours, strict=True):
        row = paper[case[1], case[2]]
        theirs = (*row.thresholds, *row.ratios[1:], *row.gpus)
        mine = (*plan["thresholds"], *plan["ratios"][1:], *plan["gpus"])
        rows.append([_name(case), *(f"{a:.3g} ({b:g})" for a, b in zip(mine, theirs, strict=True))])
    shapes: list[Row] = [[name, *s["labels"]] for name, s in zip(names, ours, strict=True)]
    stages = {size: [[plan["p95_s"][i]] for plan in ours] for i, size in enumerate(("small", "middle", "large"))}
    return [
        Figure(
            "Figure 5",
            "SLO scale for 95% attainment",
            "Lower is better; a multiple of a lone request's mean latency on the largest model.",
            charts.bars(names, {name: scales[name] for name in SYSTEMS}, "SLO scale"),
        ),
        Figure("Figure 6", "Throughput", "All requests there at once.", charts.bars(names, rush, "requests/s")),
        Figure("Figure 8", "p95 of each stage", "As planned.", charts.bars(names, stages, "s")),
        Figure(
            "Figure 9",
            "Parts left out",
            "Lower is better.",
            charts.bars(names, {name: scales[name] for name in ("cascadia", *ABLATIONS)}, "SLO scale"),
        ),
        PaperTable(
            "Table 2",
            "Thresholds, shares, GPUs",
            "What was planned, and the paper's in brackets.",
            ["case", "h1", "h2", "p2", "p3", "f1", "f2", "f3"],
            rows,
        ),
        PaperTable("Table 3", "Replicas", "What was planned.", ["case", "small", "middle", "large"], shapes),
    ]


def _name(case: Case) -> str:
    cascade, trace, q_min = case
    return f"({q_min:g}, {trace})" + (f" {cascade}" if cascade != "deepseek" else "")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
