"""The findings of the other claims: drift, routers, judges, caches, shapes, planning time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from headway_papers.reproduce import charts
from headway_papers.reproduce.cascadia import claims, drift, judges, parts, runs
from headway_papers.reproduce.claims import Rule
from headway_papers.reproduce.findings import Figure, Finding, Findings, PaperTable, Row
from headway_papers.reproduce.results import increases, mean, means_by_seed, of_runs, ratios, reductions
from headway_papers.reproduce.runner import Runner
from headway_papers.reproduce.tasks import Call, Measurement

Case = tuple[str, int, float]
Cases = Mapping[Case, Measurement]
Rates = Mapping[tuple[str, int], Measurement]
TRACE_1 = [case for case in claims.CASES if case[1] == 1]
SEED_FACTOR = 2
"""Factor on the number of seeds for measurements that take seconds and vary strongly between score tables."""
TRAINED_FACTOR = 4
"""Factor on the number of seeds for a trained judge, whose plans take a second."""
DRIFT_LOAD = 1.0
"""Rate under drift over the largest model's sustained rate: it then needs about Table 5's SLO scale of 16.37."""
Values = Sequence[float | None]
JUDGES = {"mini": "gpt-4o-mini", "llama": "llama-3.1-70b"}


def of_deepseek(runner: Runner, cases: Cases, rates: Rates) -> Findings:
    """Studies based on the cases of Table 2."""
    rate, findings = rates["deepseek", 1], Findings({})
    if runner.wants(*claims.JUDGE):
        findings += _judge_on_gpus(runner, cases, rate["rate_rps"])
    if runner.wants(*claims.SHAPE):
        findings += _other_shape(runner, cases[TRACE_1[0]], rate["rate_rps"])
    if runner.wants(*claims.SIZES):
        findings += _sizes(runner, rate["rate_rps"])
    if runner.wants(*claims.DRIFT):
        findings += _drift(runner, rate, cases)
    if runner.wants(*claims.BUDGET):
        findings += _budget(runner, cases, rate["rate_rps"])
    if runner.wants(*claims.SOME):
        findings += _fewer_models(runner, cases, rate["rate_rps"])
    return findings


def _other_shape(runner: Runner, case: Measurement, rate_rps: float) -> Findings:
    if not case["other shape"]:
        why = f"The plan is {case['plans']['cascadia']['labels'][1]}; half does not fit."
        return Findings({"other-shape": Finding([None], why)})
    by_load = zip(runs.LOADS, case["other shape"], strict=True)
    loads = [f"{load:.0%} of the rate {_cost(both)}" for load, both in by_load]
    by_memory = runner.run({"half": Call(parts.half_parallelism, {"rate_rps": rate_rps})})["half"]
    memory = [f"with {times} times the GPU's memory {_cost(both)}" for times, both in by_memory.items()]
    why = f"p95 of the stage as planned and with half: at {', '.join(loads)}. On 12 GPUs {', '.join(memory)}."
    return Findings({"other-shape": Finding([_saved(case["other shape"][0])], why)})


def _saved(both: Measurement) -> float:
    """The part of the halved shape's p95 that the own shape saves."""
    return float(1 - both["own"]["p95_s"] / both["half"]["p95_s"])


def _cost(both: Measurement) -> str:
    own_s, other_s = (both[name]["p95_s"] for name in ("own", "half"))
    return f"{own_s:.3g} and {other_s:.3g} s ({_saved(both):.1%})"


def _judge_on_gpus(runner: Runner, cases: Cases, rate_rps: float) -> Findings:
    case = TRACE_1[1]
    own = [run["p95_s"] for run in cases[case]["runs"]["cascadia"]]
    call = Call(judges.judge_on_gpus, {"q_min": case[2], "rate_rps": rate_rps, "seeds": list(range(len(own)))})
    measured = runner.run({"judge on GPUs": call})["judge on GPUs"]
    costs = {name: increases([run["p95_s"] for run in each], own) for name, each in measured["runs"].items()}
    means = ", ".join(
        f"{name} {mean(costs[name]):+.1%} and {measured['judging_s'][name]:.3g} s a judgement" for name in costs
    )
    why = (
        f"At (85, 1), against a judge elsewhere and 32 GPUs: {means}. Elsewhere: the models have 28 GPUs all the same."
    )
    return Findings({"judge-gpus": Finding(costs[next(iter(judges.JUDGES))], why)})


def _sizes(runner: Runner, rate_rps: float) -> Findings:
    arguments = {"rate_rps": rate_rps}
    measured = runner.run({("plan", n): Call(parts.scheduling, arguments | {"num_gpus": n}) for n in parts.SIZES})
    seconds = [each["plan_s"] for each in measured.values()]
    points = [(float(n), [s]) for n, s in zip(parts.SIZES, seconds, strict=True)]
    why = ", ".join(f"{n} GPUs {s:.3g} s" for n, (s,) in points)
    figure = Figure("Figure 10", "Time to plan", "Cold, one core.", charts.curves({"search": points}, "GPUs", "s"))
    return Findings({"plan-time-80": Finding([seconds[-1]], f"{why}.")}, [figure])


def _drift(runner: Runner, rate: Measurement, cases: Cases) -> Findings:
    arguments = {"q_min": 90.0, "rate_rps": DRIFT_LOAD * rate["capacity_rps"]}
    seeds = extended_seeds(runner, SEED_FACTOR)
    call = Call(drift.drift, arguments | {"seeds": list(seeds)})
    measured = runner.run({"drift": call})["drift"]

    def by_seed(system: str, key: str) -> list[float]:
        return [each[key] for each in measured["runs"][system]]

    def below(system: str) -> list[float | None]:
        return reductions(by_seed("cascadia", "p95_s"), by_seed(system, "p95_s"))

    names = ("cascadia", "static", "cascade-serve", "stand-alone")
    scales = {name: [p95 / rate["lone_s"] for p95 in by_seed(name, "p95_s")] for name in names}
    why = ", ".join(f"{name} {fmean(values):.3g}" for name, values in scales.items())
    plans = "; ".join(measured["plans"][0]) or "none"
    gains = [_gain_by_segment(measured["runs"], i, names[2:]) for i in range(len(seeds))]
    known = [fmean(run["throughput_rps"] for run in cases[case]["runs"]["cascadia"]) for case in claims.QUALITY_90]
    best = fmean(
        own / fmean(each)
        for name in names[2:]
        for own, each in zip(known, zip(*by_seed(name, "sustained_rps"), strict=True), strict=True)
    )
    segments = ", ".join(
        f"{name} {', '.join(f'{fmean(each):.3g}' for each in zip(*by_seed(name, 'sustained_rps'), strict=True))}"
        for name in names
    )
    outcomes = {
        "drift-stand-alone": Finding(below("stand-alone"), f"SLO scales: {why}."),
        "drift-cascade-serve": Finding(below("cascade-serve"), f"SLO scales: {why}."),
        "drift-throughput": Finding(
            gains,
            f"Mean over baselines and segments. Requests/s by trace: {segments}. With the rehearsed plans that know "
            f"each trace, which sustain {', '.join(f'{each:.3g}' for each in known)}: {best:.2f}x.",
        ),
        "drift-static": Finding(below("static"), f"Plans anew, first seed: {plans}."),
        "drift-quality": Finding([q - 90.0 for q in by_seed("cascadia", "quality")], "Of all requests of the run."),
    }
    by_trace = {name: list(zip(*by_seed(name, "by_trace_s"), strict=True)) for name in names}
    traces = ["trace 1, 8 min", "trace 2, 16 min", "trace 3, 10 min"]
    rows: list[Row] = [[name, fmean(scales[name]), fmean(by_seed(name, "quality"))] for name in names]
    return Findings(
        outcomes,
        [
            Figure(
                "Figure 11",
                "Drift",
                "p95 of each segment, quality 90.",
                charts.bars(traces, by_trace, "p95 latency (s)"),
            ),
            PaperTable("Table 5", "Drift", "Over the whole run.", ["system", "SLO scale", "quality"], rows),
        ],
    )


def _gain_by_segment(by_system: Measurement, seed: int, baselines: Sequence[str]) -> float:
    """Mean ratio over the segments between the sustained rates of the followed plans and the baselines."""
    own = by_system["cascadia"][seed]["sustained_rps"]
    others = [by_system[name][seed]["sustained_rps"] for name in baselines]
    return fmean(a / b for each in others for a, b in zip(own, each, strict=True))


def _budget(runner: Runner, cases: Cases, rate_rps: float) -> Findings:
    """Plans for the latency of each plan made for a quality, on trace 1."""
    tasks = {}
    for case in TRACE_1:
        arguments = {"q_min": case[2], "p95_s": cases[case]["rehearsed"]["p95_s"], "rate_rps": rate_rps}
        tasks["budget", case[2]] = Call(judges.budget, arguments)
    found = [each["quality"] for each in runner.run(tasks).values()]
    planned = [cases[case]["rehearsed"] for case in TRACE_1]
    why = "; ".join(
        f"within {own['p95_s']:.3g} s {quality:.4g}, where the plan for quality had {own['quality']:.4g}"
        for own, quality in zip(planned, found, strict=True)
    )
    values = [quality - own["quality"] for own, quality in zip(planned, found, strict=True)]
    return Findings({"latency-budget": Finding(values, f"By case on trace 1: {why}.")})


def _fewer_models(runner: Runner, cases: Cases, rate_rps: float) -> Findings:
    seeds = list(range(len(cases[TRACE_1[0]]["runs"]["cascadia"])))
    arguments = {"rate_rps": rate_rps, "seeds": seeds}
    tasks = {("some", case[2]): Call(runs.fewer_models, arguments | {"trace": 1, "q_min": case[2]}) for case in TRACE_1}
    measured, ratios, why = runner.run(tasks), dict[str, list[list[float]]](), list[str]()
    for case, subset in zip(TRACE_1, measured.values(), strict=True):
        if subset["runs"] is None:
            continue
        for system in ("stand-alone", "cascadia"):
            pairs = zip(cases[case]["runs"][system], subset["runs"]["fewer"], strict=True)
            ratios.setdefault(system, []).append([theirs["p95_s"] / ours["p95_s"] for theirs, ours in pairs])
        why.append(f"quality {case[2]:g}: {', '.join(subset['models'])}")
    text = f"{'; '.join(why)}."
    return Findings({f"some-{system}": Finding(means_by_seed(ratios[system]), text) for system in ratios})


def of_llama(runner: Runner, cases: Cases, rates: Rates) -> Findings:
    """Routers, judges and caches with the Llama models."""
    findings, seeds = Findings({}), extended_seeds(runner, SEED_FACTOR)
    arguments = {"rate_rps": rates["llama", 1]["rate_rps"]}
    if runner.wants(*claims.ROUTER):
        findings += _router(runner, cases, rates)
    if runner.wants(*claims.WEAKER):
        findings += _weaker_judges(runner.repeat("judge", judges.weaker, arguments, seeds))
    if runner.wants(*claims.TRAINED):
        measured = runner.repeat("trained", judges.trained_judge, arguments, extended_seeds(runner, TRAINED_FACTOR))
        short = [1 - each["quality"] / each["asked"] for each in measured]
        by_error = ", ".join(
            f"{error:g}: {fmean(1 - each['with error'][i] / each['asked'] for each in measured):.1%}"
            for i, error in enumerate(judges.ERRORS)
        )
        why = f"It sees lengths only. With an error of so many points besides, it falls short by {by_error}."
        findings += Findings({"judge-trained": Finding(short, why)})
    if runner.wants(*claims.CACHES):
        measured = runner.repeat("prefixes", judges.prefixes, arguments, seeds)
        findings += Findings(
            {
                "prefix-latency": Finding(
                    reductions(
                        *([each["plans"][name]["latency_s"] for each in measured] for name in ("with", "without"))
                    ),
                    "Half of each prompt in the cache.",
                ),
                "prefix-plan": Finding([each["same_gpus"] for each in measured], "GPUs per model."),
            }
        )
    if runner.wants(*claims.REGRET):
        findings += _wrong_judge(runner.repeat("wrong", judges.wrong, arguments, seeds))
    return findings


def extended_seeds(runner: Runner, factor: int) -> Sequence[int]:
    """The seeds and additional seeds: `factor` times as many."""
    first = max(runner.seeds) + 1
    return (*runner.seeds, *range(first, first + (factor - 1) * len(runner.seeds)))


def _wrong_judge(measured: list[Measurement]) -> Findings:
    """The loss of plans with a wrong judge."""
    rows: list[Row] = [
        [f"{bias}, {name}", *(fmean(each["plans"][bias][name][key] for each in measured) for key in numbers)]
        for bias, by_name in measured[0]["plans"].items()
        for name, numbers in by_name.items()
    ]
    low, high = (f"{off.bias:+g}" for off in judges.OFF)

    def of(bias: str, name: str, key: str) -> list[float]:
        return [each["plans"][bias][name][key] for each in measured]

    heads = ["judge off by, planned", "quality", "p95 (s)", "short (points)", "slower (s)"]
    shows = "Means over seeds, run with the judge."
    outcomes = {
        "regret-low": Finding(
            ratios(*(of(low, name, "p95_s") for name in (judges.BY_JUDGE, judges.INFORMED))),
            "p95 over p95, with the judge.",
        ),
        "regret-high": Finding([80.0 - quality for quality in of(high, judges.BY_JUDGE, "quality")], "By true scores."),
        "regret-known": Finding([each["kept"] for each in measured], "It decides by the same judge's scores."),
    }
    return Findings(outcomes, [PaperTable("Table 6", "Judges that are wrong", shows, heads, rows)])


def _router(runner: Runner, cases: Cases, rates: Rates) -> Findings:
    """RouteLLM for several errors of its predictions, because the paper gives none."""
    seeds = list(range(len(cases[claims.LLAMA[0]]["runs"]["cascadia"])))
    tasks = {
        (noise, case): Call(
            judges.route_llm,
            {
                "trace": case[1],
                "q_min": case[2],
                "rate_rps": rates[case[:2]]["rate_rps"],
                "noise": noise,
                "seeds": seeds,
            },
        )
        for noise in judges.NOISES
        for case in claims.LLAMA
    }
    measured = runner.run({("router", noise, case[1]): call for (noise, case), call in tasks.items()})
    lower, gains, rows = dict[float, Values](), dict[float, Values](), list[Row]()
    for noise in judges.NOISES:
        by_case = [
            (cases[case]["runs"]["cascadia"], measured["router", noise, case[1]]["runs"]) for case in claims.LLAMA
        ]
        lower[noise] = means_by_seed(
            [reductions(of_runs(own, "p95_s"), of_runs(router, "p95_s")) for own, router in by_case]
        )
        gains[noise] = means_by_seed(
            [increases(of_runs(own, "throughput_rps"), of_runs(router, "throughput_rps")) for own, router in by_case]
        )
        quality = fmean(each for _, router in by_case for each in of_runs(router, "quality"))
        rows.append([f"{noise:g}", *(100 * mean(each[noise]) for each in (lower, gains)), quality])
    slo, throughput = (_rule(name) for name in ("route-llm-slo", "route-llm-throughput"))
    both = {noise: (slo.judge(lower[noise]).holds, throughput.judge(gains[noise]).holds) for noise in judges.NOISES}
    fits = [noise for noise, verdicts in both.items() if all(verdicts)]
    open_ = [noise for noise, verdicts in both.items() if not all(verdicts) and False not in verdicts]
    fit = True if fits else None if open_ else False
    text = "; ".join(f"{row[0]} points: {row[1]:.3g}% lower, {row[2]:.3g}% more" for row in rows)
    heads = ["error (points)", "SLO scale lower by (%)", "throughput more by (%)", "router's quality"]
    return Findings(
        {
            "route-llm-slo": Finding(lower[judges.NOISE], f"By the error of predictions: {text}."),
            "route-llm-throughput": Finding(gains[judges.NOISE], f"By the error of predictions: {text}."),
            "route-llm-error": Finding(
                [fit],
                f"Both with {_numbers(fits)}; undecided with {_numbers(open_)}. By the error of predictions: {text}.",
            ),
        },
        [PaperTable("Appendix I", "RouteLLM", "By the error of its predictions.", heads, rows)],
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{each:g}" for each in values) or "none of them"


def _rule(name: str) -> Rule:
    return next(claim.rule for claim in claims.CLAIMS if claim.id == name)


def _weaker_judges(measured: list[Measurement]) -> Findings:
    """Weaker judges, by both readings of the quality."""
    outcomes, plans = {}, [each["plans"] for each in measured]
    base = [each["gpt-4o"] for each in plans]
    alone = fmean(each["bias alone"]["share"] / own["share"] - 1 for each, own in zip(plans, base, strict=True))
    for short, name in JUDGES.items():
        for suffix in ("", ", known"):
            other = [each[name + suffix] for each in plans]
            shares, times = (
                [a[key] / b[key] - 1 for a, b in zip(other, base, strict=True)] for key in ("share", "latency_s")
            )
            claim = f"judge-{short}-{{}}{suffix.replace(', ', '-')}"
            most = fmean(each["most"][name] for each in measured)
            less = [each[f"{name}, less"] for each in plans]
            why = (
                "Requests that the larger model gets. By its own scores quality reaches "
                f"{most:.3g} at most; its bias alone sends on {alone:+.1%}. Asked for 80 less its bias, by its own "
                + "scores: "
                + " and ".join(
                    f"{fmean(a[key] / b[key] - 1 for a, b in zip(less, base, strict=True)):+.1%} {what}"
                    for key, what in (("share", "requests"), ("latency_s", "latency"))
                )
                + "."
            )
            outcomes[claim.format("routing")] = Finding(shares, why)
            outcomes[claim.format("latency")] = Finding(times, "The largest p95 of a stage, as planned.")
    least = [min(each[name]["quality"] for name in JUDGES.values()) - 80.0 for each in plans]
    outcomes["judge-weak-quality"] = Finding(least, "By the reference, on the requests that were planned for.")
    heads = ["judge", "to the larger model", "latency (s)", "quality"]
    rows: list[Row] = [
        [name, *(fmean(each[name][key] for each in plans) for key in ("share", "latency_s", "quality"))]
        for name in plans[0]
    ]
    shows = "Means over seeds, as planned. Known: the quality is by the reference's scores."
    return Findings(outcomes, [PaperTable("Table 6", "Weaker judges", shows, heads, rows)])


def of_parts(runner: Runner) -> Findings:
    """Replica shapes, and the simulator's error."""
    findings = Findings({})
    if runner.wants(*claims.FIGURE_2):
        more = runner.repeat("shapes, more memory", parts.strategies, {"memory": parts.MEMORY[-1]}, runner.seeds[:1])
        findings += _strategies(runner.repeat("shapes", parts.strategies, {}), more[0])
    if runner.wants(*claims.TABLE_1):
        more = runner.repeat("table 1, more memory", parts.table_1, {"memory": parts.MEMORY[-1]}, runner.seeds[:1])
        findings += _table_1(runner.repeat("table 1", parts.table_1, {}), more[0])
    return findings


def _strategies(measured_by_seed: list[Measurement], more_memory: Measurement) -> Findings:
    """Figure 2 and its claims."""
    loads = [_by_workload(each) for each in measured_by_seed]
    best = [{name: max(each, key=each.__getitem__) for name, each in load.items()} for load in loads]
    why = "; ".join(f"{name}: {shape}" for name, shape in best[-1].items())
    outcomes = {
        "strategy-effect": Finding(
            [_effect(each) for each in loads],
            "Where it matters most, on 8 GPUs; shapes that do not fit are left out. Two GPUs have hardly any cache "
            f"beside the weights of 70B: with {parts.MEMORY[-1]:g} times the memory it is "
            f"{_effect(_by_workload(more_memory)):.3g}x.",
        ),
        "strategy-varies": Finding(
            [_loss_of_one(each) for each in loads],
            "The best shape of a workload against the one shape that loses least over all, in the workload where it "
            f"loses most. The best (DP, TP, PP), last seed: {why}.",
        ),
    }
    shapes = list(dict.fromkeys(shape for each in loads[0].values() for shape in each))
    series = {
        name: [[each[name][shape] for each in loads if shape in each[name]] for shape in shapes] for name in loads[0]
    }
    chart = charts.bars(shapes, series, "requests/s")
    return Findings(
        outcomes, [Figure("Figure 2", "Shapes on 8 GPUs", "(DP, TP, PP); all requests there at once.", chart)]
    )


def _by_workload(measured: Measurement) -> dict[str, dict[str, float]]:
    """Requests/s by workload and shape."""
    return {name: {shape: each["rps"] for shape, each in by_shape.items()} for name, by_shape in measured.items()}


def _effect(by_workload: Mapping[str, Mapping[str, float]]) -> float:
    """The largest ratio of the best shape's to the worst shape's throughput."""
    return max(max(each.values()) / min(each.values()) for each in by_workload.values())


def _loss_of_one(by_workload: Mapping[str, Mapping[str, float]]) -> float:
    """The least that one shape for all workloads costs: best throughput over the shape's, where it is most."""
    best = {name: max(each.values()) for name, each in by_workload.items()}
    shapes = set.intersection(*(set(each) for each in by_workload.values()))
    return min(max(best[name] / each[shape] for name, each in by_workload.items()) for shape in shapes)


def _table_1(measured_by_seed: list[Measurement], more_memory: Measurement) -> Findings:
    """Errors after scaling all shapes by one factor, because the paper gives neither GPUs nor rates."""
    errors, rows = list[float](), list[Row]()
    for measured in measured_by_seed:
        pairs = _pairs(measured)
        errors.append(_mean_error(pairs))
        factor = _factor(pairs)
        rows = [
            [str(shape), real, ours * factor, ours] for shape, (real, ours) in zip(parts.TABLE_1, pairs, strict=True)
        ]
    why = (
        f"Two GPUs have hardly any cache beside the weights: with {parts.MEMORY[-1]:g} times the memory it is "
        f"{_mean_error(_pairs(more_memory)):.1%}."
    )
    heads = ["(DP, TP, PP)", "paper (requests/s)", "scaled", "Headway (requests/s)"]
    table = PaperTable("Table 1", "The simulator", "Llama 3 70B, 1600 and 16 tokens.", heads, rows)
    return Findings({"simulator": Finding(errors, why)}, [table])


def _pairs(measured: Measurement) -> list[tuple[float, float]]:
    """The paper's and our throughput of each shape."""
    return [(real, measured["shapes"][" ".join(map(str, shape))]["rps"]) for shape, real in parts.TABLE_1.items()]


def _factor(pairs: Sequence[tuple[float, float]]) -> float:
    return fmean(real / ours for real, ours in pairs)


def _mean_error(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean relative error of the second numbers, scaled by one factor."""
    return fmean(abs(ours * _factor(pairs) / real - 1) for real, ours in pairs)
