"""The findings of the end-to-end claims, and their figures and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from headway.workload.quality_traces import TABLE_2, AnswerLengths
from headway_papers.reproduce import charts
from headway_papers.reproduce.cascadia import claims, own_load, paper_plans, regimes, runs, studies
from headway_papers.reproduce.cascadia.claims import CASES, EXAMPLE, LLAMA
from headway_papers.reproduce.cascadia.setup import NUM_GPUS
from headway_papers.reproduce.findings import Exhibit, Figure, Finding, Findings, PaperTable, Row
from headway_papers.reproduce.results import mean, means_by_seed, ratios, reductions
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, Measurement

Case = tuple[str, int, float]
SYSTEMS = ("cascadia", "stand-alone", "cascade-serve")
READINGS = ("cascade-serve-load", "cascade-serve-equal")
"""CascadeServe with its reaction to the load, and with the same number of GPUs for every model."""
ABLATIONS = ("uniform parallelism", "uniform allocation")
SINGLE = ("cost-stand-alone", "cost-cascade-serve", "example-85-3", "no-largest")
"""Claims about single cases."""
SINGLE_CASES = (CASES[0], EXAMPLE, CASES[4], CASES[5])
"""The cases of `SINGLE`."""
GPU_USD_PER_HOUR = 2.67
NEEDED = 1.5
"""Multiple of the throughput that Table 7's 33% lower cost at (90, 1) requires."""
JUDGED_FACTOR = 3
"""Tables for judging the plans of a case, per seed of the run, because planning takes longer than running."""


def findings(runner: Runner) -> Findings:
    """The findings of the parts with a requested claim."""
    result = Findings({})
    if runner.wants(*END_TO_END):
        result += _of_cases(runner)
    if runner.wants(*claims.LENGTHS):
        result += _lengths(runner)
    if runner.wants(*claims.FOR_THROUGHPUT):
        result += _for_throughput(runner)
    if runner.wants(*claims.OWN_LOAD):
        result += _own_load(runner)
    if runner.wants(*claims.FIGURE_7, *claims.ROUTER, *claims.WEAKER, *claims.TRAINED, *claims.CACHES, *claims.REGRET):
        cases, rates = _measured(runner, LLAMA)
        result += Findings({"slo-llama": _times(cases, "stand-alone", "p95_s")}, [_exhibit_7(cases, rates)])
        result += studies.of_llama(runner, cases, rates)
    if runner.wants(*claims.OPTIMALITY):
        result += _optimality(runner)
    if runner.wants(*claims.FIGURE_2, *claims.TABLE_1):
        result += studies.of_parts(runner)
    return Findings(result.outcomes, sorted(result.exhibits, key=_place))


def _of_cases(runner: Runner) -> Findings:
    """DeepSeek's cases; where only claims on single cases are requested, these cases alone."""
    is_whole = runner.wants(*(claim for claim in END_TO_END if claim.id not in SINGLE))
    cases, rates = _measured(runner, claims.ALL_CASES if is_whole else SINGLE_CASES)
    if not is_whole:
        return Findings(_single_cases(cases))
    outcomes = _single_cases(cases) | _figure_1(rates) | _end_to_end(cases, judged_seeds(runner))
    exhibits: list[Exhibit] = [_exhibit_1(rates["deepseek", 1]), *_exhibits(cases, rates)]
    if runner.wants(*PLANNED_FOR_MORE):
        outcomes = _planned_for_more(runner, cases, rates, outcomes)
    if runner.wants(*BY_PAPERS_PLANS):
        outcomes = _papers_plans(runner, cases, rates, outcomes)
    if runner.wants(*claims.ABLATIONS):
        found = _ablations(runner, cases, rates)
        outcomes, exhibits = outcomes | dict(found.outcomes), [*exhibits, *found.exhibits]
    if runner.wants(*claims.SARATHI):
        outcomes |= _sarathi(runner, cases, rates)
    return Findings(outcomes, exhibits) + studies.of_deepseek(runner, cases, rates)


END_TO_END = (
    *claims.FIGURE_1,
    *claims.END_TO_END,
    *claims.ABLATIONS,
    *claims.JUDGE,
    *claims.SARATHI,
    *claims.SHAPE,
    *claims.SIZES,
    *claims.DRIFT,
    *claims.BUDGET,
    *claims.SOME,
)
"""Claims that need DeepSeek's cases."""


PLANNED_FOR_MORE = ("throughput-cascade-serve", "headline-throughput", "cost-cascade-serve")
"""Claims compared with plans for a higher rate; the first one defines the cases."""

BY_PAPERS_PLANS = ("throughput-stand-alone", "headline-throughput", "throughput-most")
"""Claims that are compared with the paper's own plans, simulated here; the first has the cases."""


def judged_seeds(runner: Runner) -> Sequence[int]:
    """Seeds of the tables on which plans are judged."""
    return studies.extended_seeds(runner, JUDGED_FACTOR)


def _place(exhibit: Exhibit) -> tuple[str, int]:
    """The position in the paper's order: figures, then tables."""
    kind, _, number = exhibit.label.partition(" ")
    return kind, int("".join(filter(str.isdigit, number)) or 99)


def _rates(
    runner: Runner, pairs: Collection[tuple[str, int]], lengths: AnswerLengths = "alike"
) -> dict[tuple[str, int], Measurement]:
    calls = {
        ("rate", lengths, *pair): Call(runs.rate, {"cascade": pair[0], "trace": pair[1], "lengths": lengths})
        for pair in sorted(pairs)
    }
    return {(cascade, trace): each for (_, _, cascade, trace), each in runner.run(calls).items()}


def _measured(
    runner: Runner, cases: Sequence[Case], lengths: AnswerLengths = "alike"
) -> tuple[dict[Case, Measurement], dict[tuple[str, int], Measurement]]:
    """The measurement of every case, at the rate of its trace."""
    rates = _rates(runner, {(cascade, trace) for cascade, trace, _ in cases}, lengths)
    tasks = {}
    for cascade, trace, q_min in cases:
        seeds = judged_seeds(runner) if lengths == "alike" else runner.seeds
        arguments = {
            "cascade": cascade,
            "trace": trace,
            "q_min": q_min,
            "seeds": list(seeds),
            "lengths": lengths,
            "further": lengths == "alike" and not runner.quick,
        }
        call = Call(runs.measure_case, arguments | {"rate_rps": rates[cascade, trace]["rate_rps"]})
        tasks["case", lengths, cascade, trace, q_min] = call
    measured = runner.run(tasks)
    return {(cascade, trace, q_min): each for (_, _, cascade, trace, q_min), each in measured.items()}, rates


def _end_to_end(cases: dict[Case, Measurement], seeds: Sequence[int]) -> dict[str, Finding]:
    """Means over the 12 cases."""
    three = {case: cases[case] for case in claims.QUALITY_90}
    margins = {case: _values(each, "cascadia", "quality") for case, each in cases.items()}
    least = [min(values[i] - case[2] for case, values in margins.items()) for i in range(len(seeds))]
    largest = [cases[case]["plans"]["cascadia"] for case in CASES[:3]]
    falls = [[each["ratios"][-1] for each in largest], [each["gpus"][-1] for each in largest]]
    moves = all(values[0] >= values[1] >= values[2] and values[0] > values[2] for values in falls)
    judged = [
        reductions(*(_values(each, name, "p95_s") for name in (runs.NO_JUDGE, "cascadia"))) for each in cases.values()
    ]
    slo, throughput = (
        {other: _times(cases, other, key) for other in SYSTEMS[1:]} for key in ("p95_s", "throughput_rps")
    )
    caps = "; ".join(f"{_name(case)}: {cap:.3g}x" for case, cap in caps_of_table_2().items())
    implied = (
        f"Table 2's own shares and GPUs allow at most {caps}; the mean is {fmean(caps_of_table_2().values()):.3g}x."
    )
    stand_alone = throughput["stand-alone"]
    short = "; ".join(f"{_name(case)}: {fmean(v):.2f}" for case, v in margins.items())
    return {
        "headline-slo": _headline(slo),
        "headline-throughput": _headline(throughput),
        "slo-stand-alone": slo["stand-alone"],
        "slo-most": _largest_advantage(cases, "p95_s"),
        "slo-cascade-serve": slo["cascade-serve"],
        **{f"slo-{name}": _times(cases, name, "p95_s") for name in READINGS},
        "throughput-stand-alone": Finding(stand_alone.values, f"{stand_alone.why} {implied}"),
        "throughput-most": _largest_advantage(cases, "throughput_rps"),
        "throughput-cascade-serve": throughput["cascade-serve"],
        "always-faster": Finding(
            [_is_always_faster(cases, i) for i in range(len(seeds))], f"{_by_case(cases, 'p95_s')} {_slower_in(cases)}"
        ),
        "quality": Finding(least, f"On requests that no plan was made on: {short}."),
        "cost-stand-alone-all": _saved(three, "stand-alone"),
        "cost-cascade-serve-all": _saved(three, "cascade-serve"),
        "plans-move": Finding([moves], f"Shares {_listed(falls[0])}, GPUs {_listed(falls[1])}."),
        "plan-time": Finding(
            [each["plan_s"] for each in cases.values()],
            "CPU time of one thread, cold, with all rehearsals: on an idle core, wall time. The longest: "
            f"{max(each['plan_s'] for each in cases.values()):.3g} s.",
        ),
        "judge-time": Finding(means_by_seed(judged), "Mean over the cases."),
    }


def _single_cases(cases: dict[Case, Measurement]) -> dict[str, Finding]:
    """The claims about one or two cases."""
    first = {CASES[0]: cases[CASES[0]]}
    none = [cases[case]["plans"]["cascadia"]["gpus"][-1] for case in CASES[4:]]
    saved = _saved(first, "stand-alone")
    cap = caps_of_table_2()[CASES[0]]
    needs = f"Table 2's shares and GPUs allow {cap:.3g}x, and the paper's 33% needs {NEEDED:g}x."
    return {
        "cost-stand-alone": Finding(saved.values, f"{saved.why} {needs}"),
        "cost-cascade-serve": _saved(first, "cascade-serve"),
        "example-85-3": _times({EXAMPLE: cases[EXAMPLE]}, "stand-alone", "p95_s"),
        "no-largest": Finding([not any(none)], f"GPUs {_listed(none)}."),
    }


def caps_of_table_2() -> dict[Case, float]:
    """Returns, for each case, the largest possible throughput of Table 2's plan over the stand-alone model's, (f / 32)
    / p.

    The stand-alone model has f of the 32 GPUs in the plan, and p of the requests.
    """
    caps = {}
    for case, row in zip(CASES, TABLE_2, strict=True):
        stage = 2 if case[2] >= 85 else 1
        caps[case] = row.gpus[stage] / NUM_GPUS / row.ratios[stage]
    return caps


def _headline(by_baseline: dict[str, Finding]) -> Finding:
    """The abstract's mean over both baselines."""
    values = means_by_seed([list(finding.values) for finding in by_baseline.values()])
    means = ", ".join(f"{name} {mean(finding.values):.3g}x" for name, finding in by_baseline.items())
    return Finding(values, f"Against {means}.")


def _largest_advantage(cases: dict[Case, Measurement], key: str) -> Finding:
    """The case with the largest advantage over the stand-alone model, by seed."""
    by_case = {case: _ratios(each, "stand-alone", key) for case, each in cases.items()}
    best = max(by_case, key=lambda case: fmean(by_case[case]))
    return Finding([max(each) for each in zip(*by_case.values(), strict=True)], f"In most seeds {_name(best)}.")


def _lengths(runner: Runner) -> Findings:
    """The 12 cases, with answers that grow with difficulty and differ by model."""
    cases, rates = _measured(runner, claims.ALL_CASES, "by_difficulty")
    three = {case: cases[case] for case in claims.QUALITY_90}
    outcomes = {
        "slo-stand-alone-lengths": _times(cases, "stand-alone", "p95_s"),
        "slo-cascade-serve-lengths": _times(cases, "cascade-serve", "p95_s"),
        "throughput-stand-alone-lengths": _times(cases, "stand-alone", "throughput_rps"),
        "throughput-cascade-serve-lengths": _times(cases, "cascade-serve", "throughput_rps"),
        "cost-stand-alone-lengths": _saved(three, "stand-alone"),
    }
    names, scales = [_name(case) for case in cases], _scales(cases, rates, SYSTEMS)
    chart = charts.bars(names, scales, "SLO scale")
    shows = "As Figure 5, where answers grow with difficulty and differ by model."
    return Findings(outcomes, [Figure("Figure 5b", "SLO scale with unequal answers", shows, chart)])


def _for_throughput(runner: Runner) -> Findings:
    """The 12 cases, with all systems planned for the most throughput."""
    traces = sorted({(cascade, trace) for cascade, trace, _ in claims.ALL_CASES})
    shapes = runner.run({key: Call(regimes.measure_shapes, {"cascade": key[0], "trace": key[1]}) for key in traces})
    tasks = {
        case: Call(
            regimes.measure_throughput,
            {
                "cascade": case[0],
                "trace": case[1],
                "q_min": case[2],
                "seeds": list(runner.seeds),
                "shapes": shapes[case[:2]],
            },
        )
        for case in claims.ALL_CASES
    }
    cases = runner.run(tasks)
    times = {other: _times(cases, other, "throughput_rps") for other in regimes.SYSTEMS[1:]}
    margins = {case: _values(each, "cascadia", "quality") for case, each in cases.items()}
    least = [min(values[i] - case[2] for case, values in margins.items()) for i in range(len(runner.seeds))]
    short = "; ".join(f"{_name(case)}: {fmean(v):.2f}" for case, v in margins.items())
    alone, serve, uniform = times.values()
    outcomes = {
        "headline-throughput-planned": _headline({"stand-alone": alone, "cascade-serve": serve}),
        "headline-throughput-planned-uniform": _headline({"stand-alone": alone, "uniform CascadeServe": uniform}),
        "throughput-planned-stand-alone": alone,
        "throughput-planned-most": _largest_advantage(cases, "throughput_rps"),
        "throughput-planned-cascade-serve": serve,
        "throughput-planned-cascade-serve-uniform": uniform,
        "quality-planned": Finding(least, f"On requests that no plan was made on: {short}."),
    }
    return Findings(outcomes, [_planned_table(cases)])


def _own_load(runner: Runner) -> Findings:
    """The 12 cases, each at its own stand-alone model's load."""
    tasks = {
        case: Call(
            own_load.measure_at_own_load,
            {"cascade": case[0], "trace": case[1], "q_min": case[2], "seeds": list(runner.seeds)},
        )
        for case in claims.ALL_CASES
    }
    cases = runner.run(tasks)
    alone, serve, uniform = (_times(cases, other, "p95_s") for other in (*SYSTEMS[1:], own_load.UNIFORM))
    rates = ", ".join(f"{_name(case)} {each['rate_rps']:.3g}/s" for case, each in cases.items())
    return Findings(
        {
            "headline-slo-own-load": _headline({"stand-alone": alone, "cascade-serve": serve}),
            "slo-own-load-stand-alone": Finding(alone.values, f"{alone.why} Rates: {rates}."),
            "slo-own-load-most": _largest_advantage(cases, "p95_s"),
            "slo-own-load-cascade-serve": serve,
            "headline-slo-own-load-uniform": _headline({"stand-alone": alone, "uniform CascadeServe": uniform}),
            "slo-own-load-cascade-serve-uniform": uniform,
        }
    )


def _planned_table(cases: Mapping[Case, Measurement]) -> PaperTable:
    rows: list[Row] = []
    for case, each in cases.items():
        cells = [
            f"{', '.join(f'{shapes} ({ratio:.3g})' for shapes, ratio in each['plans'][name])}: "
            f"{fmean(_values(each, name, 'throughput_rps')):.0f}/s"
            for name in regimes.SYSTEMS
        ]
        rows.append([_name(case), *cells])
    shows = "Replicas of each model with the share of requests that reach it, and what lasts."
    return PaperTable("Figure 6b", "Plans for the most throughput", shows, ["case", *regimes.SYSTEMS], rows)


def _values(case: Measurement, system: str, key: str) -> list[float]:
    return [run[key] for run in case["runs"][system]]


def _ratios(case: Measurement, other: str, key: str) -> list[float]:
    """Ratio to another system by seed, where larger is better."""
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


def _slower_in(cases: dict[Case, Measurement]) -> str:
    """The cases in which a baseline is as fast, with its quality."""
    parts = [
        f"{_name(case)} {other} {fmean(ratios):.2f}x at quality {fmean(_values(each, other, 'quality')):.1f} "
        f"against {fmean(_values(each, 'cascadia', 'quality')):.1f}"
        for case, each in cases.items()
        for other in SYSTEMS[1:]
        if fmean(ratios := _ratios(each, other, "p95_s")) <= 1
    ]
    return f"Not slower on average: {'; '.join(parts) or 'none'}."


def _saved(cases: dict[Case, Measurement], other: str) -> Finding:
    """The saved cost. All systems use 32 GPUs, so cost per request is inversely proportional to throughput."""
    saved = {case: [1 - 1 / r for r in _ratios(each, other, "throughput_rps")] for case, each in cases.items()}
    why = []
    for case, each in cases.items():
        usd = [
            NUM_GPUS * GPU_USD_PER_HOUR / 3600 / fmean(_values(each, s, "throughput_rps")) for s in ("cascadia", other)
        ]
        why.append(f"{_name(case)}: ${usd[0]:.6f} a request against ${usd[1]:.6f}")
    return Finding(means_by_seed(saved.values()), f"{'; '.join(why)}.")


def _figure_1(rates: Any) -> dict[str, Finding]:
    lone = {trace: list(each["lone"].values()) for (cascade, trace), each in rates.items() if cascade == "deepseek"}
    rises = all(a < b for each in lone.values() for pair in pairwise(each) for a, b in zip(*pair, strict=True))
    why = "; ".join(f"trace {trace}: {_listed([s for s, _ in each])} s" for trace, each in lone.items())
    return {"size-latency": Finding([rises], f"A lone request on each model. {why}.")}


def _arguments(case: Case, rates: Any) -> Measurement:
    return {"cascade": case[0], "trace": case[1], "q_min": case[2], "rate_rps": rates[case[:2]]["rate_rps"]}


def _planned_for_more(
    runner: Runner, cases: dict[Case, Measurement], rates: Any, outcomes: dict[str, Finding]
) -> dict[str, Finding]:
    """The findings, extended by the sustained rates of plans for twice the rate: the reason for the throughput
    findings."""
    tasks = {
        ("more", *case): Call(runs.planned_for_more, _arguments(case, rates) | {"seeds": list(runner.seeds)})
        for case in CASES
    }
    text, gains = [], list[list[float]]()
    for case, measured in zip(CASES, runner.run(tasks).values(), strict=True):
        more, own = (_values(each, "cascadia", "throughput_rps") for each in (measured, cases[case]))
        gains.append(_ratios(measured, "cascade-serve", "throughput_rps"))
        slower = fmean(_values(measured, "cascadia", "p95_s")) / fmean(_values(cases[case], "cascadia", "p95_s"))
        text.append(
            f"{_name(case)}: {fmean(more):.3g} in place of {fmean(own):.3g}/s, p95 {slower:.2f} times, "
            f"{fmean(gains[-1]):.2f}x CascadeServe's"
        )
    mean = (
        f"Planned for {runs.MORE:g} times the rate, {fmean(map(fmean, gains)):.2f}x CascadeServe's in Table 2's cases"
    )
    return _with_reason(outcomes, PLANNED_FOR_MORE, mean, "; ".join(text))


def _with_reason(outcomes: dict[str, Finding], names: Sequence[str], mean: str, by_case: str) -> dict[str, Finding]:
    """The findings, extended by an experiment's mean; the first of `names` also gets its cases."""
    reasons = {name: f"{mean} ({by_case})." if name == names[0] else f"{mean}." for name in names}
    return outcomes | {
        name: Finding(each.values, f"{each.why} {reasons[name]}") for name, each in outcomes.items() if name in reasons
    }


def _papers_plans(
    runner: Runner, cases: dict[Case, Measurement], rates: Any, outcomes: dict[str, Finding]
) -> dict[str, Finding]:
    """The findings, extended by the rates that the paper's own plans sustain here."""
    tasks = {}
    for case in CASES:
        arguments = {"trace": case[1], "q_min": case[2], "rate_rps": rates[case[:2]]["rate_rps"]}
        tasks["paper", *case] = Call(paper_plans.paper_plan, arguments | {"seeds": list(runner.seeds)})
    text, means = [], list[float]()
    for case, measured in zip(CASES, runner.run(tasks).values(), strict=True):
        alone = _values(cases[case], "stand-alone", "throughput_rps")
        means.append(fmean(_values(measured, "cascadia", "throughput_rps")) / fmean(alone))
        text.append(f"{_name(case)}: {means[-1]:.2f}x")
    mean = f"The paper's own plans (Tables 2 and 3) sustain here {fmean(means):.2f} times what one model does"
    return _with_reason(outcomes, BY_PAPERS_PLANS, mean, "; ".join(text))


def _ablations(runner: Runner, cases: dict[Case, Measurement], rates: Any) -> Findings:
    """The cases of Table 2 with one part of the search uniform."""
    tasks = {
        ("ablations", *case): Call(
            runs.ablations,
            _arguments(case, rates) | {"seeds": list(judged_seeds(runner))},
        )
        for case in CASES
    }
    both = {
        case: {"runs": {**each["runs"], "cascadia": cases[case]["runs"]["cascadia"]}}
        for case, each in zip(CASES, runner.run(tasks).values(), strict=True)
    }
    chart = charts.bars([_name(case) for case in both], _scales(both, rates, ("cascadia", *ABLATIONS)), "SLO scale")
    names = ("ablation-parallelism", "ablation-allocation")
    outcomes = {name: _times(both, part, "p95_s") for name, part in zip(names, ABLATIONS, strict=True)}
    return Findings(outcomes, [Figure("Figure 9", "Parts left out", "Lower is better.", chart)])


def _sarathi(runner: Runner, cases: dict[Case, Measurement], rates: Any) -> dict[str, Finding]:
    arguments = {"seeds": list(judged_seeds(runner))}
    tasks = {
        ("sarathi", case[1]): Call(
            runs.sarathi, arguments | {"trace": case[1], "rate_rps": rates["deepseek", case[1]]["rate_rps"]}
        )
        for case in claims.QUALITY_90
    }
    by_case, chunks, faster = dict[Case, list[float]](), list[str](), list[list[float]]()
    for case, measured in zip(claims.QUALITY_90, runner.run(tasks).values(), strict=True):
        by_chunk = {chunk: _values(measured, chunk, "throughput_rps") for chunk in measured["runs"]}
        chunks.append(max(by_chunk, key=lambda chunk: fmean(by_chunk[chunk])))
        by_case[case] = ratios(_values(cases[case], "cascadia", "throughput_rps"), by_chunk[chunks[-1]])
        faster.append(ratios(by_chunk[chunks[-1]], _values(cases[case], "stand-alone", "throughput_rps")))
    why = "; ".join(f"{_name(case)}: {fmean(each):.2f}x" for case, each in by_case.items())
    best = (
        f"The best chunks are {', '.join(chunks)} tokens. The largest model's replicas sustain "
        f"{fmean(map(fmean, faster)):.2f} times as much with Sarathi's batching as with SGLang's."
    )
    return {
        "sarathi": Finding(by_case[CASES[0]], best),
        "sarathi-all": Finding(means_by_seed(by_case.values()), f"{why}. {best}"),
    }


def _optimality(runner: Runner) -> Findings:
    rate_rps = _rates(runner, {("llama", 1)})["llama", 1]["rate_rps"]
    tasks = {
        ("optimality", num_gpus, seed): Call(
            runs.optimality, {"seed": seed, "num_gpus": num_gpus, "rate_rps": rate_rps}
        )
        for num_gpus in runs.OPTIMALITY_GPUS
        for seed in runner.seeds
    }
    measured = list(runner.run(tasks).values())
    pairs = [(run["searches"]["ours"], run["searches"]["exhaustive"]) for run in measured]
    effort = [every["evaluations"] / ours["evaluations"] for ours, every in pairs]
    gaps = [None if (s := ours["latency_s"]) is None else s / every["latency_s"] - 1 for ours, every in pairs]
    plan_s, exhaustive_s = (fmean(search["cpu_s"] for search in searches) for searches in zip(*pairs, strict=True))
    why = (
        f"By GPUs ({' and '.join(map(str, runs.OPTIMALITY_GPUS))}) and seed; {measured[0]['num_requests']} requests "
        f"to a stage at most, {runs.NUM_ROUTINGS} routings, sets of one shape. By run: effort {_listed(effort)}, "
        f"gap {_listed([100 * gap for gap in gaps if gap is not None])}%."
    )
    return Findings(
        {
            "optimality": Finding(gaps, why),
            "search-effort": Finding(effort, f"{why} CPU time: {plan_s:.2g} s against {exhaustive_s:.2g} s."),
        }
    )


def _exhibit_1(rate: Measurement) -> Figure:
    lines = {name: [(lone_s, [quality])] for name, (lone_s, quality) in rate["lone"].items()}
    return Figure(
        "Figure 1",
        "Quality and latency of each model",
        "Trace 1, a lone request on the model's best shape.",
        charts.curves(lines, "mean latency (s)", "mean score"),
    )


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
    names, scales = [_name(case) for case in cases], _scales(cases, rates, SYSTEMS)
    rush = {system: [_values(each, system, "throughput_rps") for each in cases.values()] for system in SYSTEMS}
    ours = [each["plans"]["cascadia"] for each in cases.values()]
    paper = {(row.trace, row.q_min): row for row in TABLE_2}
    rows: list[Row] = []
    for case, plan in zip(cases, ours, strict=True):
        row = paper.get((case[1], case[2]))
        theirs = [f" ({each:g})" for each in (*row.thresholds, *row.ratios[1:], *row.gpus)] if row else [""] * 7
        mine = (*plan["thresholds"], *plan["ratios"][1:], *plan["gpus"])
        rows.append([_name(case), *(f"{a:.3g}{b}" for a, b in zip(mine, theirs, strict=True))])
    shapes: list[Row] = [[name, *s["labels"]] for name, s in zip(names, ours, strict=True)]
    stages = {size: [[plan["p95_s"][i]] for plan in ours] for i, size in enumerate(("small", "middle", "large"))}
    return [
        Figure(
            "Figure 5",
            "SLO scale for 95% attainment",
            "Lower is better; a multiple of a lone request's mean latency on the largest model.",
            charts.bars(names, {name: scales[name] for name in SYSTEMS}, "SLO scale"),
        ),
        Figure("Figure 6", "Throughput that lasts", "No queue grows.", charts.bars(names, rush, "requests/s")),
        Figure("Figure 8", "p95 of each stage", "As planned.", charts.bars(names, stages, "s")),
        PaperTable(
            "Table 2",
            "Thresholds, shares, GPUs",
            "What was planned, and the paper's in brackets.",
            ["case", "h1", "h2", "p2", "p3", "f1", "f2", "f3"],
            rows,
        ),
        PaperTable("Table 3", "Replicas", "What was planned.", ["case", "small", "middle", "large"], shapes),
        _by_system(cases),
    ]


def _by_system(cases: dict[Case, Measurement]) -> PaperTable:
    systems = [name for name in (*SYSTEMS, *READINGS) if all(name in each["runs"] for each in cases.values())]
    rows: list[Row] = []
    for case, each in cases.items():
        means = [
            [fmean(_values(each, name, key)) for key in ("p95_s", "quality", "throughput_rps")] for name in systems
        ]
        rows.append([_name(case), *(f"{p95_s:.1f} at {quality:.1f}, {rps:.0f}/s" for p95_s, quality, rps in means)])
    shows = "Means: p95 latency (s) at the quality reached, and what lasts. On requests that no plan was made on."
    return PaperTable("Figures 5 and 6", "Every system", shows, ["case", *systems], rows)


def _name(case: Case) -> str:
    cascade, trace, q_min = case
    return f"({q_min:g}, {trace})" + (f" {cascade}" if cascade != "deepseek" else "")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
