"""Scheduling between and within combos: Figure 2, Figure 9 and Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any

from headway import catalog
from headway.perf.params import active_params
from headway.perf.roofline import peak_flops
from headway.planning.combos.estimate import InstanceSpeed
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy import setup
from headway_papers.reproduce.cauchy.claims import COMBINED, TABLE_3
from headway_papers.reproduce.cauchy.overall import Markets, names_in
from headway_papers.reproduce.cauchy.setup import GPUS, combo, document, goodput, measured, split
from headway_papers.reproduce.cauchy.token_turns import TokenTurns
from headway_papers.reproduce.findings import Figure, Finding, PaperTable, Row
from headway_papers.reproduce.results import Key, Results, SeedResults, increases, reductions
from headway_papers.reproduce.tasks import Call

START_RPS = {"cnn-dailymail": 24.0, "sharegpt": 24.0, "longwriter": 3.0}
"""Start of the search for goodput."""
LOAD = 0.9
"""Request rate of Figure 9 over the combos' total goodput."""
LOW_LOAD = 0.4
"""A lower rate for the searches' seeds, at which equal turns overload no combo."""
NUM_COMBOS = 3
"""Different combos in Figure 9: the first ones of Eq. 15's ranking, one each."""
NUM_REQUESTS = 3000
BETWEEN = ("goodput", "round-robin", "tokens")
TURNS = f"{TokenTurns.__module__}:{TokenTurns.__name__}"
"""Another reading of token-weighted turns, for the seeds of searches."""
Routing = dict[str, Any]
WITHIN: dict[str, Routing] = {
    "strict": {"within": "strict"},
    "opportunistic": {"within": "opportunistic"},
    "empty": {"within": "opportunistic", "in_place": 0.0},
}
"""Schedulers within a combo. The paper does not define an idle instance; `in_place` is our threshold. "empty": no
requests in flight. Otherwise a prefill instance is also idle between prompts, if it has at most half of a decoder's
answers."""
THRESHOLDS = (0.05, 0.1, 0.2)
"""Further values of `in_place`."""


def searches(seeds: Sequence[int], quick: bool, figure_2: bool, table_3: bool, thresholds: bool) -> dict[Key, Call]:
    """The first round: searches for the goodput of GPU pairs, by scheduler."""
    tasks: dict[Key, Call] = {}

    def add(key: Key, combos: list[dict[str, Any]], routing: Routing, parts: int = 1) -> None:
        arguments = {"workload": "sharegpt", "combos": combos, "routing": routing, "seed": key[-1], "quick": quick}
        tasks[key] = Call(goodput, arguments | {"start_rps": START_RPS["sharegpt"] * parts})

    for seed in seeds if figure_2 else ():
        for pair in (*COMBINED, *(f"{name}-{name}" for name in GPUS)):
            for within, routing in WITHIN.items():
                is_judged = within == "opportunistic" or (within == "strict") is (pair not in COMBINED)
                if is_judged or seed == seeds[0]:
                    add(("pair", pair, within, seed), [split("pair", pair)], routing)
    for num in TABLE_3 if table_3 or thresholds else ():
        for within, routing in WITHIN.items():
            for seed in seeds:
                add(("within", num, within, seed), [split("pair", "h800-h20", num)], routing, num)
    for num, threshold, seed in product(TABLE_3, THRESHOLDS, seeds) if thresholds else ():
        routing = {"within": "opportunistic", "in_place": threshold}
        add(("within", num, threshold, seed), [split("pair", "h800-h20", num)], routing, num)
    return tasks


def runs(
    results: Results,
    markets: Markets,
    seeds: Sequence[int],
    repeats: Sequence[int],
    quick: bool,
    figure_9: bool,
    table_3: bool,
) -> dict[Key, Call]:
    """The second round: runs at the rates from the first round. `repeats`: seeds of Figure 9."""
    tasks: dict[Key, Call] = {}
    num_requests = NUM_REQUESTS // (3 if quick else 1)

    def add(key: Key, contents: dict[str, Any], some: Sequence[int]) -> None:
        tasks.update({(*key, seed): Call(measured, {"document": contents, "seed": seed}) for seed in some})

    for workload in names_in(markets) if figure_9 else ():
        combos = mixed_combos(markets, workload)
        rate = LOAD * sum(each["goodput_rps"] for each in combos)
        for between in BETWEEN:
            contents = document(workload, rate, num_requests, **_routed({"between": between}, combos))
            add(("between", workload, between), contents, repeats)
        for between in BETWEEN[:2]:
            routed = _routed({"between": between}, combos)
            add(("low", workload, between), document(workload, rate * LOW_LOAD / LOAD, num_requests, **routed), seeds)
        turns = {"fleet": [], "combos": combos, "policies": {"routing": TURNS}}
        add(("between", workload, TURNS), document(workload, rate, num_requests, **turns), seeds)
    if figure_9:
        one = mixed_combos(markets, "longwriter")[0]
        for between in BETWEEN[:2]:
            routed = _routed({"between": between}, [{**one, "replicas": NUM_COMBOS}])
            contents = document("longwriter", NUM_COMBOS * LOAD * one["goodput_rps"], num_requests, **routed)
            add(("alike", between), contents, repeats)
    for num in TABLE_3 if table_3 else ():
        for within, routing in WITHIN.items():
            for seed in seeds:
                routed = _routed(routing, [split("pair", "h800-h20", num)])
                contents = document("sharegpt", results["within", num, "strict", seed]["rps"], num_requests, **routed)
                add(("run", num, within), contents, (seed,))
    return tasks


def _routed(arguments: dict[str, Any], combos: list[dict[str, Any]]) -> dict[str, Any]:
    return {"fleet": [], "combos": combos, "policies": {"routing": {"name": "cauchy", **arguments}}}


def mixed_combos(markets: Markets, workload: str) -> list[dict[str, Any]]:
    """Figure 9's combos with their goodputs."""
    some = markets["closed-form", workload].candidates[:NUM_COMBOS]
    return [combo(f"combo-{i}", each.combo, 1, each.goodput_rps) for i, each in enumerate(some)]


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

    def rps(self, pair: str, within: str = "opportunistic") -> list[float]:
        """Goodput by seed."""
        return self.values(("pair", pair, within), "rps")

    def gains(self, key: str, baseline: str, within: str = "opportunistic") -> list[float]:
        """Gain of two pairs by type over one pair of each type with the baseline's scheduler."""
        first, second = (self.rps(f"{name}-{name}", baseline) for name in key.split("-"))
        return [2 * both / (a + b) - 1 for both, a, b in zip(self.rps(key, within), first, second, strict=True)]

    def _with(self, key: str, within: str) -> float:
        """Gain of splitting by type if both sides use the same scheduler, with the first seed."""
        both, a, b = (
            self.results["pair", pair, within, self.seeds[0]]["rps"]
            for pair in (key, *(f"{name}-{name}" for name in key.split("-")))
        )
        return float(2 * both / (a + b) - 1)

    def outcomes(self) -> dict[str, Finding]:
        findings = {}
        for key in COMBINED:
            first, second = key.split("-")
            alike = (f"{first}-{first}", f"{second}-{second}")
            numbers = ", ".join(f"{pair.upper()} {fmean(self.rps(pair)):.1f}" for pair in (key, *alike))
            strict = ", ".join(f"{pair.upper()} {fmean(self.rps(pair, 'strict')):.1f}" for pair in alike)
            why = (
                f"Goodput of a pair in requests/s: {numbers}; strict: {strict}. With one scheduler on both sides: "
                f"strict {self._with(key, 'strict'):+.1%}, opportunistic where only empty instances are idle "
                f"{self._with(key, 'empty'):+.1%}. {bounds(first, second)}"
            )
            findings[f"fig2-{key}"] = Finding(self.gains(key, "strict"), why)
            findings[f"fig2-{key}-own"] = Finding(self.gains(key, "opportunistic"), why)
            findings[f"fig2-{key}-empty"] = Finding(
                self.gains(key, "strict", "empty"), f"A pair serves {fmean(self.rps(key, 'empty')):.1f} requests/s."
            )
        return findings

    def figure(self) -> Figure:
        groups = list(COMBINED.values())
        labels = {"strict": "over DistServe", "opportunistic": "over each type with Cauchy's scheduler"}
        values = {
            label: [[1 + gain for gain in self.gains(key, baseline)] for key in COMBINED]
            for baseline, label in labels.items()
        }
        shows = "Tokens per USD of two pairs that prefill on one type and decode on the other; 1: each type for itself."
        return Figure("Figure 2", "Unlike GPUs together", shows, charts.bars(groups, values, "relative tokens per USD"))


class BetweenRuns(SeedResults):
    """The findings of Figure 9."""

    def __init__(self, results: Results, markets: Markets, repeats: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__(results, repeats)
        self.markets, self.search_seeds, self.names = markets, seeds, names_in(markets)

    def e2e_s(self, workload: str, between: str) -> list[float]:
        return self.values(("between", workload, between), "e2e_s")

    def _mean_e2e_s(self, *key: str) -> list[float]:
        """Mean E2E latency by seed of the searches."""
        return [self.results[*key, seed]["e2e_s"] for seed in self.search_seeds]

    def reduction(self, workload: str, other: str) -> list[float | None]:
        """Reduction of the mean latency by goodput-weighted turns, by seed."""
        return reductions(self.e2e_s(workload, "goodput"), self.e2e_s(workload, other))

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for workload in self.names:
            combos = self.markets["closed-form", workload].candidates[:NUM_COMBOS]
            weights = ", ".join(f"{each.combo.label} {each.goodput_rps:.1f}/s" for each in combos)
            numbers = ", ".join(f"{name} {fmean(self.e2e_s(workload, name)):.2f} s" for name in BETWEEN)
            rates = [each.goodput_rps for each in combos]
            low = reductions(*(self._mean_e2e_s("low", workload, between) for between in BETWEEN[:2]))
            why = (
                f"Mean E2E: {numbers}. Combos: {weights}; load {LOAD:.0%} of that. Equal turns give each combo "
                f"{LOAD * fmean(rates):.1f}/s. At {LOW_LOAD:.0%}, {LOW_LOAD * fmean(rates):.1f}/s each, "
                f"goodput-weighted turns are {fmean(v for v in low if v is not None):.1%} lower."
            )
            findings[f"fig9-rr-{workload}"] = Finding(self.reduction(workload, "round-robin"), why)
            turns = fmean(self._mean_e2e_s("between", workload, TURNS))
            tokens = (
                f"{why} Each request goes to the combo with the most tokens left, as the text says; with turns in "
                f"proportion to the tokens left, as the name says, {turns:.2f} s."
            )
            findings[f"fig9-tokens-{workload}"] = Finding(self.reduction(workload, "tokens"), tokens)
        alike = reductions(*(self.values(("alike", between), "e2e_s") for between in BETWEEN[:2]))
        why = "Identical combos have identical goodputs, so their weights are equal, and so are the two policies."
        return findings | {"fig9-identical": Finding(alike, why)}

    def figure(self) -> Figure:
        names = {"round-robin": "basic", "tokens": "token-weighted", "goodput": "goodput-weighted"}
        series = {label: [self.e2e_s(workload, name) for workload in self.names] for name, label in names.items()}
        chart = charts.bars(list(self.names.values()), series, "mean E2E (s)", yaxis={"type": "log"})
        shows = f"One each of the first {NUM_COMBOS} combos by Eq. 15, at {LOAD:.0%} of their goodput."
        return Figure("Figure 9", "Turns between unlike combos", shows, chart)


class WithinRuns(SeedResults):
    """The findings of Table 3."""

    def __init__(self, results: Results, seeds: Sequence[int]) -> None:
        super().__init__(results, seeds)
        pattern = setup.profiled_service("sharegpt").service.pattern
        self.tokens = pattern.prompt_tokens + pattern.output_tokens

    def rps(self, num: int, within: str | float) -> list[float]:
        """Goodput by seed, with a scheduler of `WITHIN` or a threshold."""
        return self.values(("within", num, within), "rps")

    def gains(self, num: int, within: str | float) -> list[float]:
        """Increase of goodput over strict round robin, by seed."""
        return [free / strict - 1 for free, strict in zip(self.rps(num, within), self.rps(num, "strict"), strict=True)]

    def tokens_per_usd(self, num: int, within: str) -> float:
        h800, h20 = (catalog.gpu(GPUS[name]).usd_per_hour for name in ("h800", "h20"))
        return 3600 * fmean(self.rps(num, within)) * self.tokens / (h800 + num * h20)

    def at_load(self, num: int, within: str, name: str) -> list[float]:
        """A measurement by seed, at the rate that round robin can serve."""
        return self.values(("run", num, within), name)

    def outcomes(self) -> dict[str, Finding]:
        findings: dict[str, Finding] = {}
        for num, (within, suffix) in product(TABLE_3, (("opportunistic", ""), ("empty", "-empty"))):
            strict, free = self.rps(num, "strict"), self.rps(num, within)
            slow, fast = (self.at_load(num, each, "e2e_s") for each in ("strict", within))
            moved = fmean(self.at_load(num, within, "moved"))
            numbers = (
                f"{fmean(strict):.1f} and {fmean(free):.1f} requests/s; at the rate that round robin can serve, "
                f"{1 - moved:.1%} of the requests stay in place."
            )
            findings[f"table3-goodput-1p{num}d{suffix}"] = Finding(increases(free, strict), numbers)
            why = f"Mean E2E {fmean(slow):.2f} and {fmean(fast):.2f} s. {1 - moved:.1%} of the requests stay in place."
            findings[f"table3-e2e-1p{num}d{suffix}"] = Finding(reductions(fast, slow), why)
        return findings

    def thresholds(self) -> dict[str, Finding]:
        """Goodput by the definition of idle, and whether one threshold gives the paper's three gains."""
        by_threshold: dict[float, str | float] = {
            0.0: "empty",
            **{each: each for each in THRESHOLDS},
            0.5: "opportunistic",
        }
        findings, found = {}, {}
        for num in TABLE_3:
            found[num] = {threshold: self.gains(num, within) for threshold, within in by_threshold.items()}
            listed = ", ".join(f"{fmean(gains):.1%} ({threshold:g})" for threshold, gains in found[num].items())
            for threshold in THRESHOLDS:
                why = f"1P{num}D by in_place: {listed}."
                findings[f"table3-goodput-1p{num}d-at-{100 * threshold:g}"] = Finding(found[num][threshold], why)
        paper = {num: rps[1] / rps[0] - 1 for num, (rps, *_) in TABLE_3.items()}
        gives_all = [
            any(all(paper[num] / 2 <= found[num][each][i] <= 2 * paper[num] for num in paper) for each in by_threshold)
            for i in range(len(self.seeds))
        ]
        at = "; ".join(
            f"{threshold:g}: {', '.join(f'{fmean(found[num][threshold]):.1%}' for num in paper)}"
            for threshold in by_threshold
        )
        return findings | {"table3-threshold": Finding(gives_all, f"Gains of 1P1D, 1P2D, 1P3D by in_place: {at}.")}

    def table(self) -> PaperTable:
        """Table 3, with the paper's numbers in parentheses."""
        rows: list[Row] = []
        for num, (rps, efficiency, e2e) in TABLE_3.items():
            for i, within in ((0, "strict"), (1, "opportunistic"), (1, "empty")):
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
