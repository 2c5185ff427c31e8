"""Consequences of Cauchy's formulas and examples that need no fleet: Figure 1, 3.3.2, 3.3.3, Eq. 18."""

from __future__ import annotations

from functools import partial

from msgspec import structs

from headway import catalog
from headway.planning.combos.candidates import Efficiencies, better_directions, enumerate_combos
from headway.planning.combos.cost_efficiency import a1, a2, stated
from headway.planning.combos.estimate import InstanceSpeed
from headway.planning.combos.problem import ComboCandidate, ComboProblem, Counts, GpuCombo, Group, ServiceDemand
from headway.planning.combos.search import deploy
from headway_papers.reproduce import charts
from headway_papers.reproduce.cauchy import setup
from headway_papers.reproduce.cauchy.claims import WORKLOADS
from headway_papers.reproduce.cauchy.network import network_claims
from headway_papers.reproduce.findings import Exhibit, Figure, Finding, PaperTable, Row

SECOND_MODEL = "qwen1.5-14b"
"""The second model of 3.3.3, beside the model of all measurements."""
WORKED = (("h800", "a800"), ("a800", "h20"), ("a800", "a800"), ("h800", "h20"))
"""The four candidates for LongWriter in 3.3.3: types for prefill and for decode."""


def outcomes() -> dict[str, Finding]:
    return _shares() | _examples() | _network()


def _speeds() -> InstanceSpeed:
    engine = catalog.engine(setup.ENGINE)
    return InstanceSpeed(catalog.model(setup.MODEL), catalog.gpu(setup.GPUS["h800"]), engine, 1)


def unloaded_s(workload: str) -> tuple[float, float]:
    """Seconds of prefill and of decode of a lone mean request on an H800."""
    pattern = setup.profiled_service(workload).service.pattern
    speeds = _speeds()
    return speeds.prompts_s(pattern, 1), speeds.step_s(pattern, 1) * (pattern.output_tokens - 1)


def prefill_share(workload: str, batch: int | None = None) -> float:
    """Share of prefill in the time of an H800 that decodes this many sequences at once; None: as many as memory and
    batch slots allow."""
    pattern = setup.profiled_service(workload).service.pattern
    speeds = _speeds()
    batch = speeds.batch(pattern) if batch is None else batch
    prefill_s = speeds.prompt_s(pattern)
    return prefill_s / (prefill_s + speeds.step_s(pattern, batch) / batch * (pattern.output_tokens - 1))


def _shares() -> dict[str, Finding]:
    prefill_s, decode_s = unloaded_s("cnn-dailymail")
    share = prefill_s / (prefill_s + decode_s)
    pattern = setup.profiled_service("cnn-dailymail").service.pattern
    needed_s = 1.5 * decode_s
    prefill = partial(prefill_share, "cnn-dailymail")
    several = ", ".join(f"{prefill(batch):.0%} with {batch} at once" for batch in (1, 8, 32, 128))
    mfu = 2 * 8e9 * pattern.prompt_tokens / needed_s / 989e12
    why = (
        f"Alone, {pattern.prompt_tokens:.0f} tokens take {prefill_s * 1e3:.0f} ms and {pattern.output_tokens:.0f} "
        f"more {decode_s * 1e3:.0f} ms; 60% would be {needed_s * 1e3:.0f} ms of prefill, {mfu:.1%} of the GPU's "
        f"FLOPs. Of the time of a GPU, where decode is shared, prefill is {several}, {prefill():.0%} if "
        "it is full: the paper's figure is that of a busy GPU."
    )
    first_s, rest_s = unloaded_s("longwriter")
    last = f"{first_s * 1e3:.0f} ms of prefill, {rest_s:.1f} s of decode."
    return {
        "fig1-prefill": Finding([share], why),
        "fig1-decode": Finding([rest_s / (first_s + rest_s)], last),
    }


def _examples() -> dict[str, Finding]:
    def candidate(gpu: str, goodput_rps: float, usd_per_hour: float, tokens_per_usd: float) -> ComboCandidate:
        combo = GpuCombo(setup.MODEL, usd_per_hour, aggregated=Group(gpu))
        return ComboCandidate("example", combo, goodput_rps, tokens_per_usd)

    a800, h20 = candidate("a800", 0.82, 1.09, 1.07e6), candidate("h20", 1.23, 1.50, 1.15e6)
    chosen = deploy(
        ComboProblem((ServiceDemand("example", 0.80),), (a800, h20), {"a800": 8, "h20": 8}), explain=False
    ).combos
    took = len(chosen) == 1 and chosen[0].combo == a800.combo and chosen[0].count == 1
    weights = [each.combo.usd_per_hour / (each.tokens_per_usd or 1.0) * 1e6 for each in (a800, h20)]
    best = by_eq_15(setup.MODEL, "longwriter")
    ce = Efficiencies(setup.profiled_service("longwriter").service, setup.offers()).closed_form
    first = [tuple(group.gpu for group in each.phases) for each in best[: len(WORKED)]]
    ranked = [f"{' to '.join(g.gpu for g in each.phases)} {(ce(each) or 0.0) / 1e6:.0f}" for each in best]
    paper = {tuple(setup.GPUS[name] for name in pair) for pair in WORKED}
    return {
        "example-residual": Finding(
            [float(took)], f"P/C is {weights[0]:.2f} for the A800 combo, {weights[1]:.2f} for the H20 combo."
        ),
        "example-candidates": Finding(
            [float(len(paper & set(first)))],
            f"By Eq. 15 (M tokens/USD): {', '.join(ranked)}. It is a sum over the phases: a type that is good for a "
            "dollar in either phase comes before one that is not, whatever the other phase has.",
        ),
    }


def by_eq_15(model_name: str, workload: str) -> list[GpuCombo]:
    """Combos with one GPU per phase, in descending order of Eq. 15, in the better direction of each pair."""
    model, sizes = catalog.model(model_name), Counts(prefill=(1,), decode=(1,), aggregated=())
    combos, _ = enumerate_combos(model, catalog.engine(setup.ENGINE), setup.offers(), sizes)
    like = setup.profiled_service(workload).service
    ce = Efficiencies(structs.replace(like, model=model), setup.offers()).closed_form
    kept, _ = better_directions(combos, ce)
    return sorted(kept, key=lambda each: -(ce(each) or 0.0))


def _network() -> dict[str, Finding]:
    small, large = network_claims()
    numbers = (
        "the formula gives the paper's figure for {:.0f} GPUs that prefill as one; with the real shape {:.1f} GB/s."
    )
    return {
        f"eq18-{key}": Finding(
            [each.formula_bytes_per_s / 1e9],
            f"One GPU at its peak: {numbers.format(each.num_gpus_to_match, each.shape_bytes_per_s / 1e9)}",
        )
        for key, each in (("8b", small), ("70b", large))
    } | {
        "eq18-ratio": Finding(
            [large.formula_bytes_per_s / small.formula_bytes_per_s],
            "Both models have a KV cache of 8 heads a layer; FLOPs grow faster than layers.",
        )
    }


def exhibits() -> list[Exhibit]:
    """Figure 1, and the formula's rows."""
    parts = {workload: unloaded_s(workload) for workload in WORKLOADS}
    series: dict[str, list[list[float]]] = {"prefill": [], "decode": [], "prefill, of a full GPU's time": []}
    for workload, (prefill_s, decode_s) in parts.items():
        total_s = prefill_s + decode_s
        series["prefill"].append([100 * prefill_s / total_s])
        series["decode"].append([100 * decode_s / total_s])
        series["prefill, of a full GPU's time"].append([100 * prefill_share(workload)])
    chart = charts.bars(list(WORKLOADS.values()), series, "%", yaxis={"range": [0, 100]})
    shows = ", ".join(f"{WORKLOADS[w]} {p / (p + d):.1%}" for w, (p, d) in parts.items())
    return [Figure("Figure 1", "Shares of a request's latency, alone on an H800", f"Prefill: {shows}.", chart)]


def network_table() -> PaperTable:
    """The bandwidth of KV transfers (Eq. 18) by model, in GB/s: claimed, by the formula, and by the model's shape."""
    rows: list[Row] = [
        [
            each.model,
            each.claimed_bytes_per_s / 1e9,
            each.formula_bytes_per_s / 1e9,
            each.shape_bytes_per_s / 1e9,
            each.num_gpus_to_match,
        ]
        for each in network_claims()
    ]
    heads = ["model", "the text (GB/s)", "the formula", "with the real shape", "GPUs to match the text"]
    shows = "2,048 tokens on an A100, at its peak FLOPs, a batch of one."
    return PaperTable("Equation 18", "The network that hides a transfer behind prefill", shows, heads, rows)


def worked_table() -> PaperTable:
    """The first step of 3.3.3: coefficients and ranking by Eq. 15 with one GPU per phase, for both models and all
    workloads."""
    rows: list[Row] = []
    for model in map(catalog.model, (setup.MODEL, SECOND_MODEL)):
        for workload, name in WORKLOADS.items():
            like = setup.profiled_service(workload).service
            efficiencies = Efficiencies(structs.replace(like, model=model), setup.offers())
            ranked = by_eq_15(model.name, workload)[:4]
            costs, pattern = stated(model), like.pattern
            batch = efficiencies.estimate.speed(model.name, ranked[0].phases[1]).batch(pattern)
            first = a1(costs, pattern.prompt_tokens)
            second = a2(costs, batch, pattern.prompt_tokens, pattern.output_tokens)
            numbers = ", ".join(each.label for each in ranked)
            rows.append([model.name, name, 1e12 * first, 1e9 * second, batch, numbers])
    heads = ["model", "workload", "A1 (per TFLOP)", "A2 (per GB)", "batch", "highest CE by Eq. 15"]
    shows = (
        "The paper's four candidates for Llama-3.1-8B on short prompts and long answers are H800 to A800, A800 to H20, "
        "two A800, and H800 to H20; it gives no values."
    )
    return PaperTable("Figure 4", "Combos by the closed form", shows, heads, rows)
