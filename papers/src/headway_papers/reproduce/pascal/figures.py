"""PASCAL's figures, and additional figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from headway.report.charts import Figure as Chart
from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Exhibit, Figure, PaperTable, Row
from headway_papers.reproduce.pascal.bench import ALPACA, ARENA, HEAVY, LEVELS, TRACE, Bench
from headway_papers.reproduce.pascal.runs import (
    FCFS,
    NO_MIGRATION,
    NON_ADAPTIVE,
    PASCAL,
    READINGS,
    RR,
    SHORTEST,
    SOONEST,
    TPOT_ONLY,
    lengths,
)
from headway_papers.reproduce.tasks import Call, Measurement

Exhibits = list[Exhibit]
Seeds = Sequence[Measurement]
TITLES = {ALPACA: "AlpacaEval 2.0", ARENA: "Arena-Hard"}
THREE = (FCFS, RR, PASCAL)
PARTS = ("executed", "blocked", "preempted")
PROBLEMS = {"MATH-500": "math-500", "GPQA": "gpqa", "LiveCodeBench": "live-code-bench"}
SKETCHED = 3
"""Seeds for figures and tables without claims."""


def phases(bench: Bench) -> Exhibits:
    """Figures 4 and 5: the phases of reasoning and of answering alone, by scheduler."""
    figures: Exhibits = []
    for label, name, what in (
        ("Figure 4", "pascal-reasoning", "Reasoning"),
        ("Figure 5a", "pascal-answering", "Answers"),
    ):
        rate, free, by_system = bench.phase(name, FCFS, RR)
        systems = {"oracle": free, **by_system}
        title = f"{what} with half the memory, {rate:.3g} requests/s"
        shows = "By tokens of the phase: mean latency over the oracle's, and what requests did in that time."
        figures.append(Figure(label, title, shows, _stacked(systems, free)))
        latencies = {system: _by_length(runs, 1) for system, runs in systems.items()}
        figures.append(
            Figure(label, f"{what}: seconds", "The same.", charts.curves(latencies, "tokens", "latency (s)"))
        )
    attained = {system: _by_length(runs, 4) for system, runs in systems.items()}
    shows = "The share of answers with a QoE of 0.95 or more, for a first token within 0.25 s and 100 ms each."
    return [*figures, Figure("Figure 5b", "SLO attainment", shows, charts.curves(attained, "tokens", "attained"))]


def simulator(bench: Bench) -> Exhibits:
    """Section V-A: the simulator's errors beside the paper's."""
    found = bench.simulator_errors()
    if found is None:
        return []
    rows: list[Row] = [
        [words, 100 * fmean(_values(found, key)), paper]
        for key, words, paper in (("e2e_mean", "E2E", 1.62), ("ttft_mean", "TTFT", 12.6), ("tpot_mean", "TPOT", 6.49))
    ]
    shows = "Mean absolute errors over measured experiments, in percent."
    return [PaperTable("Beyond: simulator", "The simulator's errors", shows, ["latency", "Headway", "paper"], rows)]


def _by_length(runs: Seeds, part: int) -> list[tuple[float, list[float]]]:
    """One of the stored numbers for each length."""
    return [(row[0], [run["lengths"][i][part] for run in runs]) for i, row in enumerate(runs[0]["lengths"])]


def _stacked(systems: Mapping[str, Seeds], free: Seeds) -> Chart:
    alone = [fmean(seeds) for _, seeds in _by_length(free, 1)]
    groups: list[str] = []
    parts: dict[str, list[list[float]]] = {name: [] for name in PARTS}
    for i, (length, *_) in enumerate(free[0]["lengths"]):
        for system, runs in systems.items():
            groups.append(f"{length} {system}")
            latency, blocked, preempted = (fmean(_by_length(runs, part)[i][1]) / alone[i] for part in (1, 2, 3))
            for name, value in zip(PARTS, (latency - blocked - preempted, blocked, preempted), strict=True):
                parts[name].append([value])
    return charts.bars(groups, parts, "latency / oracle's", barmode="stack")


def chat(bench: Bench, key: str) -> Exhibits:
    """Figures 8 to 12 of one dataset."""
    name = TITLES[key]
    by_level = {level: dict(zip(THREE, bench.runs(key, level, *THREE), strict=True)) for level in LEVELS}
    high, rates = by_level["high"], {level: bench.rate(key, level) for level in LEVELS}
    first = high[FCFS][0]
    drawn = {"reasoning": first["reasoning_quantiles"], "answers": first["answer_quantiles"]}
    figures: Exhibits = [
        Figure("Figure 8", f"{name}: tokens", "Of the requests of seed 0.", charts.distributions(drawn, "tokens"))
    ]
    for level in LEVELS:
        title = f"{name}, {level} rate: {rates[level]:.3g} requests/s"
        figures.append(Figure("Figure 9", title, "Some requests of seed 0.", _scatter(by_level[level])))
    shows = f"At {rates['high']:.3g} requests/s, by 256 reasoning tokens; maximum, P90, P95 or P99 by the bin's size."
    violations = {
        system: [(rates[level], _values(by_level[level][system], "violations")) for level in LEVELS] for system in THREE
    }
    tokens = {system: [_values(by_level[level][system], "tokens_per_s") for level in LEVELS] for system in THREE}
    pace = f"The share of answers with a QoE below 0.95, by pace alone ({1e3 * TPOT_ONLY.tpot_s:.0f} ms a token)."
    figures += [
        Figure("Figure 10", f"{name}: tail TTFT", shows, _by_bin(high, "tails", "tail TTFT (s)")),
        Figure("Figure 11", f"{name}: SLOs missed", pace, charts.curves(violations, "requests/s", "missed")),
        Figure("Figure 12", f"{name}: throughput", "Until all is served.", charts.bars(LEVELS, tokens, "tokens/s")),
    ]
    return figures


def migration(bench: Bench) -> Exhibits:
    """Figures 13 and 15: without migration, and with migration of all answers."""
    pascal, pinned, moved = bench.runs(ALPACA, "high", PASCAL, NO_MIGRATION, NON_ADAPTIVE)
    two, other = {PASCAL: pascal, NO_MIGRATION: pinned}, {PASCAL: pascal, NON_ADAPTIVE: moved}
    blocked = {name: [_values(runs, "blocking_p99_s")] for name, runs in two.items()}
    e2e = {name: [_values(runs, f"e2e_{q}_s") for q in ("p50", "p90", "p99")] for name, runs in other.items()}
    where = "AlpacaEval 2.0, high rate"
    missed = f"By rate; {SKETCHED} seeds at most."
    return [
        Figure("Figure 13a", "Without migration: tail TTFT", where, _by_bin(two, "tails", "tail TTFT (s)")),
        Figure("Figure 13b", "Reasoning latency", where, _by_bin(two, "reasoning", "mean reasoning (s)")),
        Figure("Figure 13c", "From reasoning to answer", "P99.", charts.bars(["high rate"], blocked, "blocking (s)")),
        Figure("Figure 13d", "SLOs missed", missed, _missed(bench, PASCAL, NO_MIGRATION)),
        Figure("Figure 15a", "All answers migrate: TTFT", where, _distributions(other)),
        Figure("Figure 15b", "SLOs missed", missed, _missed(bench, PASCAL, NON_ADAPTIVE)),
        Figure("Figure 15c", "End-to-end latency", where, charts.bars(["P50", "P90", "P99"], e2e, "latency (s)")),
    ]


def _missed(bench: Bench, *systems: str) -> Chart:
    lines: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in systems}
    for level in LEVELS:
        for name, runs in zip(systems, bench.runs(ALPACA, level, *systems, most=SKETCHED), strict=True):
            lines[name].append((bench.rate(ALPACA, level), _values(runs, "violations")))
    return charts.curves(lines, "requests/s", "missed")


def heavy(bench: Bench) -> Exhibits:
    """Figures 14 and 16: requests with long reasoning, and their TTFT."""
    systems = dict(zip(THREE, bench.runs(HEAVY, "high", *THREE), strict=True))
    calls = {title: Call(lengths, {"builtin": name, "num_requests": 2000}) for title, name in PROBLEMS.items()}
    drawn = {
        f"{title}: {what}": quantiles[what]
        for title, quantiles in bench.runner.run(calls).items()
        for what in ("reasoning", "answers")
    }
    where = f"Half of Arena-Hard, half problems; {bench.rate(HEAVY, 'high'):.3g} requests/s."
    shows = "As the built-in workloads assume them."
    return [
        Figure("Figure 14", "Problems: tokens", shows, charts.distributions(drawn, "tokens", xaxis={"type": "log"})),
        Figure("Figure 16a", "Reasoning-heavy: TTFT", where, _distributions(systems)),
        Figure("Figure 16b", "Reasoning-heavy: tail TTFT", where, _by_bin(systems, "tails", "tail TTFT (s)")),
    ]


def readings(bench: Bench) -> Exhibits:
    """Other readings of the paper's text, and orderings with an oracle."""
    names = (*THREE, NO_MIGRATION, NON_ADAPTIVE, *READINGS)
    runs = dict(zip(names, bench.runs(ALPACA, "high", *names, most=SKETCHED), strict=True))
    shows = f"AlpacaEval 2.0, high rate, means of {SKETCHED} seeds at most. Turns in a circle: whoever has used up a "
    shows += (
        "quantum goes behind all who wait. Host memory that does not count: free GPU blocks are room for an answer."
    )
    oracles = (*THREE, SHORTEST, SOONEST)
    best = dict(zip(oracles, bench.runs(ALPACA, "high", *oracles, most=SKETCHED), strict=True))
    oracle_note = "The same, with orderings that know all lengths."
    return [
        PaperTable("Beyond: readings", "How the text can be read", shows, HEADS, _rows(runs)),
        PaperTable("Beyond: oracles", "What is left on the table", oracle_note, HEADS, _rows(best)),
    ]


def trace(bench: Bench) -> Exhibits:
    if bench.trace is None:
        return []
    names = (*THREE, SOONEST)
    runs = dict(zip(names, bench.runs(TRACE, "high", *names), strict=True))
    shows = "Requests to a production DeepSeek-R1 (ServeGen), each slice of the day at its own high rate."
    return [
        Figure("Beyond: trace", "Production: tail TTFT", shows, _by_bin(runs, "tails", "tail TTFT (s)")),
        PaperTable("Beyond: trace", "Production requests", shows, HEADS, _rows(runs)),
    ]


HEADS = (
    "policies",
    "TTFT mean s",
    "TTFT P99 s",
    "blocking P99 s",
    "SLOs missed %",
    "E2E P50 s",
    "E2E P99 s",
    "tokens/s",
)


def _rows(systems: Mapping[str, Seeds]) -> list[Row]:
    rows: list[Row] = []
    for name, runs in systems.items():
        tail = fmean(run["ttft_quantiles_s"][99] for run in runs)
        mean = {key: fmean(_values(runs, key)) for key in _COLUMNS}
        rows.append([name, mean["ttft_mean_s"], tail, mean["blocking_p99_s"], 100 * mean["violations"]])
        rows[-1] += [mean["e2e_p50_s"], mean["e2e_p99_s"], mean["tokens_per_s"]]
    return rows


_COLUMNS = ("ttft_mean_s", "blocking_p99_s", "violations", "e2e_p50_s", "e2e_p99_s", "tokens_per_s")


def _values(runs: Seeds, name: str) -> list[float]:
    return [run[name] for run in runs]


def _by_bin(systems: Mapping[str, Seeds], what: str, y: str) -> Chart:
    """Curves through the bins that most seeds have."""
    lines = {}
    for name, runs in systems.items():
        values_by_bin: dict[int, list[float]] = {}
        for run in runs:
            for first, _, value in run[what]:
                values_by_bin.setdefault(first, []).append(value)
        lines[name] = [
            (first, values) for first, values in sorted(values_by_bin.items()) if 2 * len(values) > len(runs)
        ]
    return charts.curves(lines, "reasoning tokens", y)


def _distributions(systems: Mapping[str, Seeds]) -> Chart:
    samples = {name: np.ravel([run["ttft_quantiles_s"] for run in runs]).tolist() for name, runs in systems.items()}
    return charts.distributions(samples, "TTFT (s)")


def _scatter(systems: Mapping[str, Seeds]) -> Chart:
    """TTFT over the length of the reasoning: the requests of the first seed."""
    points = {name: [(x, [y]) for x, y in runs[0]["points"]] for name, runs in systems.items()}
    chart = charts.curves(points, "reasoning tokens", "TTFT (s)")
    for each in chart["data"]:
        each |= {"mode": "markers", "marker": {"size": 4, "color": each["line"]["color"], "opacity": 0.6}}
    return chart
