"""The findings of the other claims: drift, routers, judges, caches, shapes, planning time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.reproduce import charts
from headway.reproduce.cascadia import claims, drift, judges, parts, runs
from headway.reproduce.findings import Figure, Finding, PaperTable
from headway.reproduce.runner import Runner
from headway.reproduce.tasks import Call, Measurement

Case = tuple[str, int, float]
Cases = Mapping[Case, Measurement]
Rates = Mapping[tuple[str, int], Measurement]
Results = tuple[dict[str, Finding], list[Figure | PaperTable]]
TRACE_1 = [case for case in claims.CASES if case[1] == 1]
SEED_FACTOR = 3
"""Factor on the number of seeds for measurements that take seconds and vary much between score tables."""
JUDGES = {"mini": "gpt-4o-mini", "llama": "llama-3.1-70b"}


def _ids(*of: Sequence[Any]) -> list[str]:
    return [claim.id for each in of for claim in each]


def of_deepseek(runner: Runner, cases: Cases, rates: Rates) -> Results:
    """Those that go on from the cases of Table 2."""
    rate = rates["deepseek", 1]
    outcomes, exhibits = dict[str, Finding](), list[Figure | PaperTable]()
    if runner.wants(*_ids(claims.SHAPE)):
        outcomes["other-shape"] = _other_shape(cases[TRACE_1[0]], len(runner.seeds))
    if runner.wants(*_ids(claims.SIZES)):
        outcomes["plan-time-80"], figure = _sizes(runner, rate["rate_rps"])
        exhibits.append(figure)
    if runner.wants(*_ids(claims.DRIFT)):
        found, more = _drift(runner, rate)
        outcomes |= found
        exhibits += more
    if runner.wants(*_ids(claims.BUDGET)):
        outcomes["latency-budget"] = _budget(runner, cases, rate["rate_rps"])
    if runner.wants(*_ids(claims.SOME)):
        outcomes |= _some(runner, cases, rate["rate_rps"])
    return outcomes, exhibits


def _other_shape(case: Measurement, num_seeds: int) -> Finding:
    own_s, other_s = case["other shape"]
    if other_s is None:
        return Finding([None] * num_seeds, f"The plan is {case['plans']['cascadia']['labels'][1]}; half does not fit.")
    values = [1 - own_s / other_s] * num_seeds
    return Finding(values, f"p95 of the stage: {own_s:.3g} s as planned, {other_s:.3g} s with half.")


def _sizes(runner: Runner, rate_rps: float) -> tuple[Finding, Figure]:
    arguments = {"rate_rps": rate_rps, "quick": runner.quick}
    measured = runner.run({("plan", n): Call(parts.scheduling, arguments | {"num_gpus": n}) for n in parts.SIZES})
    seconds = [each["plan_s"] for each in measured.values()]
    points = [(float(n), [s]) for n, s in zip(parts.SIZES, seconds, strict=True)]
    why = ", ".join(f"{n} GPUs {s:.3g} s" for n, (s,) in points)
    figure = Figure("Figure 10", "Time to plan", "Cold, one core.", charts.curves({"search": points}, "GPUs", "s"))
    return Finding([seconds[-1]] * len(runner.seeds), f"{why}."), figure


def _drift(runner: Runner, rate: Measurement) -> Results:
    arguments = {"q_min": 90.0, "lone_s": rate["lone_s"], "quick": runner.quick}
    call = Call(drift.drift, arguments | {"seeds": list(runner.seeds)})
    measured = runner.run({"drift": call})["drift"]

    def by_seed(system: str, key: str) -> list[float]:
        return [each[key] for each in measured[system]]

    def below(system: str) -> list[float]:
        return [
            1 - ours / theirs
            for ours, theirs in zip(by_seed("cascadia", "p95_s"), by_seed(system, "p95_s"), strict=True)
        ]

    names = ("cascadia", "static", "cascade-serve", "stand-alone")
    scales = {name: [p95 / rate["lone_s"] for p95 in by_seed(name, "p95_s")] for name in names}
    why = ", ".join(f"{name} {fmean(values):.3g}" for name, values in scales.items())
    plans = "; ".join(f"at {at:.0f} s ({why})" for at, why, _, _ in measured["plans"][0]) or "none"
    gains = [
        fmean(a / by_seed(b, "in_time_rps")[i] for b in names[2:])
        for i, a in enumerate(by_seed("cascadia", "in_time_rps"))
    ]
    outcomes = {
        "drift-stand-alone": Finding(below("stand-alone"), f"SLO scales: {why}."),
        "drift-cascade-serve": Finding(below("cascade-serve"), f"SLO scales: {why}."),
        "drift-throughput": Finding(gains, "The mean of both, and requests within an SLO scale of 12 per second."),
        "drift-static": Finding(below("static"), f"Plans anew, first seed: {plans}."),
        "drift-quality": Finding([q - 90.0 for q in by_seed("cascadia", "quality")], "Of all requests of the run."),
    }
    by_trace = {name: [[each["by_trace_s"][i] for each in measured[name]] for i in range(3)] for name in names}
    traces = ["trace 1, 8 min", "trace 2, 16 min", "trace 3, 10 min"]
    rows: list[list[str | float | None]] = [
        [name, fmean(scales[name]), fmean(by_seed(name, "quality"))] for name in names
    ]
    return outcomes, [
        Figure(
            "Figure 11", "Drift", "p95 of each segment, quality 90.", charts.bars(traces, by_trace, "p95 latency (s)")
        ),
        PaperTable("Table 5", "Drift", "Over the whole run.", ["system", "SLO scale", "quality"], rows),
    ]


def _budget(runner: Runner, cases: Cases, rate_rps: float) -> Finding:
    case = TRACE_1[1]
    p95_s = fmean(run["p95_s"] for run in cases[case]["runs"]["cascadia"])
    quality = fmean(run["quality"] for run in cases[case]["runs"]["cascadia"])
    arguments = {"q_min": case[2], "p95_s": p95_s, "rate_rps": rate_rps, "quick": runner.quick}
    measured = runner.run({"budget": Call(judges.budget, arguments)})["budget"]
    why = f"Within {p95_s:.3g} s: quality {measured['quality']:.4g}, where the plan for quality had {quality:.4g}."
    return Finding([measured["quality"] - quality] * len(runner.seeds), why)


def _some(runner: Runner, cases: Cases, rate_rps: float) -> dict[str, Finding]:
    arguments = {"rate_rps": rate_rps, "seeds": list(runner.seeds), "quick": runner.quick}
    tasks = {("some", case[2]): Call(runs.some_models, arguments | {"trace": 1, "q_min": case[2]}) for case in TRACE_1}
    measured, ratios, why = runner.run(tasks), dict[str, list[list[float]]](), list[str]()
    for case, subset in zip(TRACE_1, measured.values(), strict=True):
        if subset["runs"] is None:
            continue
        for system in ("stand-alone", "cascadia"):
            pairs = zip(cases[case]["runs"][system], subset["runs"], strict=True)
            ratios.setdefault(system, []).append([theirs["p95_s"] / ours["p95_s"] for theirs, ours in pairs])
        why.append(f"quality {case[2]:g}: {', '.join(subset['models'])}")
    text = f"{'; '.join(why)}."
    return {
        f"some-{system}": Finding([fmean(each) for each in zip(*ratios[system], strict=True)], text)
        for system in ratios
    }


def of_llama(runner: Runner, cases: Cases, rates: Rates) -> Results:
    """Routers, judges and caches, with the Llama models."""
    outcomes, rate_rps = dict[str, Finding](), rates["llama", 1]["rate_rps"]
    exhibits: list[Figure | PaperTable] = []
    arguments = {"rate_rps": rate_rps, "quick": runner.quick}
    if runner.wants(*_ids(claims.ROUTER)):
        outcomes |= _router(runner, cases, rates)
    if runner.wants(*_ids(claims.WEAKER)):
        measured = runner.run(
            {("judge", seed): Call(judges.weaker, arguments | {"seed": seed}) for seed in _extended_seeds(runner)}
        )
        outcomes |= _weaker(list(measured.values()))
        exhibits.append(_table_6(list(measured.values())))
    if runner.wants(*_ids(claims.TRAINED)):
        tasks = {
            ("trained", seed): Call(judges.trained_judge, arguments | {"seed": seed})
            for seed in _extended_seeds(runner)
        }
        short = [1 - each["quality"] / each["asked"] for each in runner.run(tasks).values()]
        outcomes["judge-trained"] = Finding(short, "It sees lengths only, and the scores hardly depend on them.")
    if runner.wants(*_ids(claims.CACHES)):
        tasks = {
            ("prefixes", seed): Call(judges.prefixes, arguments | {"seed": seed}) for seed in _extended_seeds(runner)
        }
        cached = list(runner.run(tasks).values())
        outcomes["prefix-latency"] = Finding([each["saved"] for each in cached], "Half of each prompt in the cache.")
        outcomes["prefix-plan"] = Finding([each["same_gpus"] for each in cached], "GPUs per model.")
    if runner.wants(*_ids(claims.REGRET)):
        lost, exhibit = _wrong(runner, arguments)
        outcomes |= lost
        exhibits.append(exhibit)
    return outcomes, exhibits


def _extended_seeds(runner: Runner) -> Sequence[int]:
    """The seeds, and further ones."""
    first = max(runner.seeds) + 1
    return (*runner.seeds, *range(first, first + (SEED_FACTOR - 1) * len(runner.seeds)))


def _wrong(runner: Runner, arguments: Measurement) -> tuple[dict[str, Finding], PaperTable]:
    """The loss of plans with a wrong judge."""
    calls = {("wrong", seed): Call(judges.wrong, arguments | {"seed": seed}) for seed in runner.seeds}
    measured = list(runner.run(calls).values())
    planned = ("by its scores", "by true scores", "knowing it")
    names = [f"{off.bias:+g}, {name}" for off in judges.OFF for name in planned]
    rows: list[list[str | float | None]] = [
        [name, *(fmean(each["runs"][i][k] for each in measured) for k in range(4))] for i, name in enumerate(names)
    ]
    heads = ["judge off by, planned", "quality", "p95 (s)", "short (points)", "slower (s)"]
    outcomes = {
        "regret-low": Finding([each["slower_s"] for each in measured], "Than the fastest run with as much quality."),
        "regret-high": Finding([each["short_points"] for each in measured], "By true scores, as far as any plan goes."),
        "regret-known": Finding([each["kept"] for each in measured], "It decides by the same judge's scores."),
    }
    return outcomes, PaperTable(
        "Table 6", "Judges that are wrong", "Means over seeds, run with the judge.", heads, rows
    )


def _router(runner: Runner, cases: Cases, rates: Rates) -> dict[str, Finding]:
    tasks = {}
    for case in claims.LLAMA:
        arguments = {"trace": case[1], "q_min": case[2], "rate_rps": rates[case[:2]]["rate_rps"]}
        tasks["router", case[1]] = Call(
            judges.route_llm, arguments | {"seeds": list(runner.seeds), "quick": runner.quick}
        )
    measured = list(runner.run(tasks).values())
    slower, gains, why = list[list[float]](), list[list[float]](), list[str]()
    for case, router in zip(claims.LLAMA, measured, strict=True):
        own = cases[case]["runs"]["cascadia"]
        slower.append([1 - run["p95_s"] / theirs for run, theirs in zip(own, router["p95_s"], strict=True)])
        rps = zip(own, router["throughput_rps"], strict=True)
        gains.append([run["throughput_rps"] / theirs - 1 for run, theirs in rps])
        why.append(f"trace {case[1]}: router at quality {fmean(router['quality']):.4g}")
    text = f"Predictions are {judges.NOISE:g} points off. {'; '.join(why)}."
    return {
        "route-llm-slo": Finding([fmean(each) for each in zip(*slower, strict=True)], text),
        "route-llm-throughput": Finding([fmean(each) for each in zip(*gains, strict=True)], text),
    }


def _weaker(measured: list[Measurement]) -> dict[str, Finding]:
    outcomes = {}
    for short, name in JUDGES.items():
        shares = [each[name]["share"] / each["gpt-4o"]["share"] - 1 for each in measured]
        times = [each[name]["latency_s"] / each["gpt-4o"]["latency_s"] - 1 for each in measured]
        outcomes[f"judge-{short}-routing"] = Finding(shares, "Requests that the larger model gets.")
        outcomes[f"judge-{short}-latency"] = Finding(times, "The largest p95 of a stage, as planned.")
    least = [min(each[name]["quality"] for name in JUDGES.values()) - 80.0 for each in measured]
    outcomes["judge-weak-quality"] = Finding(least, "By the reference, on the requests that were planned for.")
    return outcomes


def _table_6(measured: list[Measurement]) -> PaperTable:
    heads = ["judge", "to the larger model", "latency (s)", "quality"]
    rows: list[list[str | float | None]] = [
        [name, *(fmean(each[name][key] for each in measured) for key in ("share", "latency_s", "quality"))]
        for name in ("gpt-4o", *JUDGES.values())
    ]
    return PaperTable("Table 6", "Weaker judges", "Means over seeds, as planned.", heads, rows)


def of_parts(runner: Runner) -> Results:
    outcomes, exhibits = dict[str, Finding](), list[Figure | PaperTable]()
    seeds, quick = runner.seeds, runner.quick
    if runner.wants(*_ids(claims.FIGURE_2)):
        measured = runner.run(
            {("shapes", seed): Call(parts.strategies, {"seed": seed, "quick": quick}) for seed in seeds}
        )
        outcomes |= _strategies(list(measured.values()))
        exhibits.append(_figure_2(list(measured.values())))
    if runner.wants(*_ids(claims.TABLE_1)):
        measured = runner.run({("table 1", seed): Call(parts.table_1, {"seed": seed}) for seed in seeds})
        outcome, table = _table_1(list(measured.values()))
        outcomes["simulator"] = outcome
        exhibits.append(table)
    return outcomes, exhibits


def _by_workload(measured: Measurement) -> dict[str, dict[str, float]]:
    by_workload: dict[str, dict[str, float]] = {}
    for name, rps in measured.items():
        model, lengths, shape = name.split(" ", 2)
        by_workload.setdefault(f"{model}, {lengths}", {})[f"({shape.replace(' ', ', ')})"] = rps
    return by_workload


def _strategies(measured_by_seed: list[Measurement]) -> dict[str, Finding]:
    effects, varies, why = list[float](), list[bool](), ""
    for measured in measured_by_seed:
        loads = _by_workload(measured)
        effects.append(max(max(each.values()) / min(each.values()) for each in loads.values()))
        best = {name: max(each, key=each.__getitem__) for name, each in loads.items()}
        varies.append(len(set(best.values())) > 1)
        why = "; ".join(f"{name}: {shape}" for name, shape in best.items())
    return {
        "strategy-effect": Finding(effects, "Where it matters most, on 8 GPUs; shapes that do not fit are left out."),
        "strategy-varies": Finding(varies, f"The best (DP, TP, PP): {why}."),
    }


def _figure_2(measured_by_seed: list[Measurement]) -> Figure:
    loads = [_by_workload(each) for each in measured_by_seed]
    shapes = list(dict.fromkeys(shape for each in loads[0].values() for shape in each))
    series = {
        name: [[each[name][shape] for each in loads if shape in each[name]] for shape in shapes] for name in loads[0]
    }
    return Figure("Figure 2", "Shapes on 8 GPUs", "(DP, TP, PP); all requests there at once.",
                  charts.bars(shapes, series, "requests/s"))  # fmt: skip


def _table_1(measured_by_seed: list[Measurement]) -> tuple[Finding, PaperTable]:
    """Errors after scaling all shapes by one factor, as the paper gives neither GPUs nor rates."""
    errors, rows = list[float](), list[list[str | float | None]]()
    for measured in measured_by_seed:
        pairs = [(real, measured[" ".join(map(str, shape))]) for shape, real in parts.TABLE_1.items()]
        factor = fmean(real / ours for real, ours in pairs)
        errors.append(fmean(abs(ours * factor / real - 1) for real, ours in pairs))
        rows = [
            [str(shape), real, ours * factor, ours] for shape, (real, ours) in zip(parts.TABLE_1, pairs, strict=True)
        ]
    why = "The paper's best shapes have many replicas, ours many GPUs a replica: with fewer, caches are small."
    heads = ["(DP, TP, PP)", "paper (requests/s)", "scaled", "Headway (requests/s)"]
    return Finding(errors, why), PaperTable("Table 1", "The simulator", "Llama 3 70B, 1600 and 16 tokens.", heads, rows)
