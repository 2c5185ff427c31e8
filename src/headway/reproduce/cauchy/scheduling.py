"""Scheduling between and within combos: Figure 2, Figure 9 and Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from headway import catalog
from headway.perf.params import active_params
from headway.perf.roofline import peak_flops
from headway.planning.combos.estimate import InstanceSpeed
from headway.reproduce import charts
from headway.reproduce.cauchy import setup
from headway.reproduce.cauchy.claims import COMBINED, TABLE_3, WORKLOADS
from headway.reproduce.cauchy.setup import GPUS, document, goodput, measure, split
from headway.reproduce.findings import Figure, Finding, PaperTable, Row
from headway.reproduce.results import Key, Results, SeedResults, increases, reductions
from headway.reproduce.tasks import Call, SimulationTask

UNLIKE = ("h800-h20", "a800-a800", "h20-h20")
"""Figure 9: one combo of each, where the paper's are all alike."""
START_RPS = {"cnn-dailymail": 24.0, "sharegpt": 24.0, "longwriter": 3.0}
"""Where a search for goodput begins."""
LOAD = 0.9
"""Figure 9's requests per second, of the combos' goodput together."""
NUM_REQUESTS = 3000
BETWEEN = ("goodput", "round-robin", "tokens")
WITHIN = ("strict", "opportunistic")


def searches(seeds: Sequence[int], quick: bool, figure_2: bool, figure_9: bool, table_3: bool) -> dict[Key, Call]:
    tasks: dict[Key, Call] = {}

    def add(key: Key, workload: str, combos: list[dict[str, Any]], within: str, seed: int, parts: int = 1) -> None:
        arguments = {"workload": workload, "combos": combos, "within": within, "seed": seed, "quick": quick}
        tasks[key] = Call(goodput, arguments | {"start_rps": START_RPS[workload] * parts})

    for seed in seeds if figure_2 else ():
        for first, second in (key.split("-") for key in COMBINED):
            for a, b in ((first, second), (first, first), (second, second)):
                add(
                    ("pair", "sharegpt", f"{a}-{b}", seed),
                    "sharegpt",
                    [split("pair", f"{a}-{b}")],
                    "opportunistic",
                    seed,
                )
    for workload in WORKLOADS if figure_9 else ():
        for pair in UNLIKE:
            key = ("pair", workload, pair, seeds[0])
            add(key, workload, [split("pair", pair)], "opportunistic", seeds[0])
    for num in TABLE_3 if table_3 else ():
        for within in WITHIN:
            for seed in seeds:
                combos = [split("pair", "h800-h20", num)]
                add(("within", num, within, seed), "sharegpt", combos, within, seed, num)
    return tasks


def runs(
    results: Results, seeds: Sequence[int], repeats: Sequence[int], quick: bool, figure_9: bool, table_3: bool
) -> dict[Key, SimulationTask]:
    """The second round: at the rates that the first one found. `repeats`: seeds of Figure 9."""
    tasks: dict[Key, SimulationTask] = {}
    num_requests = NUM_REQUESTS // (3 if quick else 1)
    for workload in WORKLOADS if figure_9 else ():
        combos = unlike(results, workload, seeds[0])
        rate = LOAD * sum(each["goodput_rps"] for each in combos)
        for between in BETWEEN:
            routed = _routed({"between": between}, combos)
            contents = document(workload, rate, num_requests, **routed)
            tasks |= {("between", workload, between, seed): SimulationTask(contents, seed, measure) for seed in repeats}
    if figure_9:
        one = unlike(results, "longwriter", seeds[0])[0]
        rate = 3 * LOAD * one["goodput_rps"]
        for between in BETWEEN[:2]:
            routed = _routed({"between": between}, [{**one, "replicas": 3}])
            contents = document("longwriter", rate, num_requests, **routed)
            tasks |= {("alike", between, seed): SimulationTask(contents, seed, measure) for seed in repeats}
    for num in TABLE_3 if table_3 else ():
        for within in WITHIN:
            for seed in seeds:
                rate = results["within", num, "strict", seed]["rps"]
                routed = _routed({"within": within}, [split("pair", "h800-h20", num)])
                contents = document("sharegpt", rate, num_requests, **routed)
                tasks["run", num, within, seed] = SimulationTask(contents, seed, measure)
    return tasks


def _routed(arguments: dict[str, Any], combos: list[dict[str, Any]]) -> dict[str, Any]:
    return {"fleet": [], "combos": combos, "policies": {"routing": {"name": "cauchy", **arguments}}}


def unlike(results: Results, workload: str, seed: int) -> list[dict[str, Any]]:
    """Figure 9's combos, with their goodputs."""
    return [split(pair, pair, goodput_rps=results["pair", workload, pair, seed]["rps"]) for pair in UNLIKE]


def bounds(first: str, second: str) -> str:
    """The bottleneck of the pair, by the step-time model."""
    service = setup.profiled_service("sharegpt").service
    speeds = [InstanceSpeed(service.model, catalog.gpu(GPUS[name]), service.engine, 1) for name in (first, second)]
    prefill, decode, alone = (
        each.prefill_rps(service.pattern, service.slo) if i == 0 else each.decode_rps(service.pattern, service.slo)
        for i, each in ((0, speeds[0]), (1, speeds[1]), (1, speeds[0]))
    )
    batch = round(decode * service.pattern.output_tokens * (service.slo.tpot_s or 0.0))
    flops_s = batch * 2 * active_params(service.model) / peak_flops(catalog.gpu(GPUS[second]), "bf16")
    return (
        f"By the step-time model one {first.upper()} prefills {prefill:.0f}/s and one {second.upper()} decodes "
        f"{decode:.0f}/s (one {first.upper()} {alone:.0f}/s): the decoder is the bottleneck, with {batch} sequences in "
        f"{1e3 * (service.slo.tpot_s or 0.0):.0f} ms, of which {1e3 * flops_s:.0f} ms are FLOPs at its peak."
    )


class PairRuns(SeedResults):
    """The findings of Figure 2."""

    def rps(self, pair: str) -> list[float]:
        """Goodput, a value a seed."""
        return self.values(("pair", "sharegpt", pair), "rps")

    def gains(self, key: str) -> list[float]:
        """Two pairs by type, against one pair of each."""
        first, second = key.split("-")
        split_by_type, alike, second_alike = self.rps(key), self.rps(f"{first}-{first}"), self.rps(f"{second}-{second}")
        return [2 * both / (a + b) - 1 for both, a, b in zip(split_by_type, alike, second_alike, strict=True)]

    def outcomes(self) -> dict[str, Finding]:
        findings = {}
        for key in COMBINED:
            first, second = key.split("-")
            pairs = (key, f"{first}-{first}", f"{second}-{second}")
            numbers = ", ".join(f"{pair.upper()} {fmean(self.rps(pair)):.1f}" for pair in pairs)
            why = f"Goodput of a pair in requests/s: {numbers}. {bounds(first, second)}"
            findings[f"fig2-{key}"] = Finding(self.gains(key), why)
        return findings

    def figure(self) -> Figure:
        groups = list(COMBINED.values())
        values = {"by type, over split alike": [[1 + gain for gain in self.gains(key)] for key in COMBINED]}
        shows = "Tokens per USD of two pairs that prefill on one type and decode on the other; 1: each type for itself."
        return Figure("Figure 2", "Unlike GPUs together", shows, charts.bars(groups, values, "relative tokens per USD"))


class BetweenRuns(SeedResults):
    """The findings of Figure 9."""

    def e2e_s(self, workload: str, between: str) -> list[float]:
        return self.values(("between", workload, between), "e2e_s")

    def reduction(self, workload: str, other: str) -> list[float | None]:
        """By seed: the share by which goodput-weighted turns lower the mean latency."""
        return reductions(self.e2e_s(workload, "goodput"), self.e2e_s(workload, other))

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for workload in WORKLOADS:
            combos = unlike(self.results, workload, self.seeds[0])
            weights = ", ".join(f"{each['name'].upper()} {each['goodput_rps']:.1f}/s" for each in combos)
            numbers = ", ".join(f"{name} {fmean(self.e2e_s(workload, name)):.2f} s" for name in BETWEEN)
            shares = [each["goodput_rps"] for each in combos]
            like = (
                " The goodputs are much the same, so there is little to weigh."
                if max(shares) < 1.3 * min(shares)
                else ""
            )
            why = f"Mean E2E: {numbers}. Combos: {weights}; load {LOAD:.0%} of that.{like}"
            findings[f"fig9-rr-{workload}"] = Finding(self.reduction(workload, "round-robin"), why)
            tokens = f"{why} Token-weighted turns fill the combo with the largest memory first, not the fastest."
            findings[f"fig9-tokens-{workload}"] = Finding(self.reduction(workload, "tokens"), tokens)
        alike = reductions(*(self.values(("alike", between), "e2e_s") for between in BETWEEN[:2]))
        why = "Identical combos have identical goodputs, so their weights are equal, and so are the two policies."
        return findings | {"fig9-identical": Finding(alike, why)}

    def figure(self) -> Figure:
        names = {"round-robin": "basic", "tokens": "token-weighted", "goodput": "goodput-weighted"}
        series = {label: [self.e2e_s(workload, name) for workload in WORKLOADS] for name, label in names.items()}
        chart = charts.bars(list(WORKLOADS.values()), series, "mean E2E (s)", yaxis={"type": "log"})
        shows = f"One combo each of {', '.join(UNLIKE).upper()}, at {LOAD:.0%} of their goodput."
        return Figure("Figure 9", "Turns between unlike combos", shows, chart)


class WithinRuns(SeedResults):
    """The findings of Table 3."""

    def __init__(self, results: Results, seeds: Sequence[int]) -> None:
        super().__init__(results, seeds)
        pattern = setup.profiled_service("sharegpt").service.pattern
        self.tokens = pattern.prompt_tokens + pattern.output_tokens

    def rps(self, num: int, within: str) -> list[float]:
        """Goodput, a value a seed."""
        return self.values(("within", num, within), "rps")

    def tokens_per_usd(self, num: int, within: str) -> float:
        h800, h20 = (catalog.gpu(GPUS[name]).usd_per_hour for name in ("h800", "h20"))
        return 3600 * fmean(self.rps(num, within)) * self.tokens / (h800 + num * h20)

    def at_load(self, num: int, within: str, name: str) -> list[float]:
        """By seed: a measurement at the rate that round robin can serve."""
        return self.values(("run", num, within), name)

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for num in TABLE_3:
            strict, free = (self.rps(num, within) for within in WITHIN)
            gains = increases(free, strict)
            slow, fast = (self.at_load(num, within, "e2e_s") for within in WITHIN)
            moved = fmean(self.at_load(num, "opportunistic", "moved"))
            numbers = (
                f"{fmean(strict):.1f} and {fmean(free):.1f} requests/s. The decoders are the bottleneck; at the rate "
                f"that round robin can serve the H800, between prompts, writes the answers to {1 - moved:.0%} of the "
                "requests itself."
            )
            findings[f"table3-goodput-1p{num}d"] = Finding(gains, numbers)
            findings[f"table3-ce-1p{num}d"] = Finding(
                gains, f"Prices are the same, so this is the gain in goodput. {numbers}"
            )
            why = f"Mean E2E {fmean(slow):.2f} and {fmean(fast):.2f} s. {1 - moved:.1%} of the requests stay in place."
            findings[f"table3-e2e-1p{num}d"] = Finding(reductions(fast, slow), why)
        return findings

    def table(self) -> PaperTable:
        """Table 3, with the paper's numbers in brackets."""
        rows: list[Row] = []
        for num, (rps, efficiency, e2e) in TABLE_3.items():
            for i, within in enumerate(WITHIN):
                latencies = [fmean(self.at_load(num, within, name)) for name in ("e2e_s", "ttft_s", "tbt_s")]
                ours = [self.tokens_per_usd(num, within) / 1e3, fmean(self.rps(num, within)), latencies[0]]
                paper = (efficiency[i], rps[i], e2e[i])
                both = [each for pair in zip(ours, paper, strict=True) for each in pair]
                rows.append([f"1P{num}D", within, *both, 1e3 * latencies[1], 1e3 * latencies[2]])
        heads = ["combo", "scheduling", "K tokens/USD", "paper", "goodput (req/s)", "paper", "E2E (s)", "paper"]
        shows = (
            "Latencies at the rate that round robin can serve. The paper's E2E (22 s at 16 ms a token) would be "
            "answers of 1,370 tokens, not ShareGPT's 207."
        )
        return PaperTable("Table 3", "Scheduling within a combo", shows, [*heads, "TTFT (ms)", "TBT (ms)"], rows)
