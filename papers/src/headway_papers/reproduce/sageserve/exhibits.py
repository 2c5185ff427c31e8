"""SageServe's figures and tables, reproduced in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from headway_papers.reproduce import charts
from headway_papers.reproduce.findings import Exhibit, Figure, PaperTable, Row
from headway_papers.reproduce.sageserve import orderings, runs, scenes
from headway_papers.reproduce.sageserve.measures import CAUSES
from headway_papers.reproduce.sageserve.published import DELAYS_S
from headway_papers.reproduce.sageserve.runs import BOUND, DAY, KNOWS, LONG_TERM, PEAK, READING, SCOUT
from headway_papers.reproduce.sageserve.scenes import LLAMA_2, MODELS, REACTIVE, REGIONS, SILOED
from headway_papers.reproduce.sageserve.table import SageServeRuns
from headway_papers.reproduce.tasks import Measurement

Exhibits = list[Exhibit]
_COLUMNS = (
    ("instance_hours", "instance-hours"),
    ("wasted_hours", "starting"),
    ("starts", "starts"),
    ("spot_hours", "spot hours"),
    ("kv_use", "KV use"),
    ("late", "late"),
    ("ttft_p90_s", "TTFT P90"),
    ("ttft_p95_s", "P95"),
    ("ttft_p99_s", "P99 (s)"),
    ("batch_p95_s", "batch P95 (s)"),
)


def exhibits(results: SageServeRuns, served: Mapping[str, Measurement]) -> Exhibits:
    figures: Exhibits = []
    if results.includes(PEAK):
        figures += _silos(results)
    if results.includes(DAY):
        figures += _day(results)
    if results.includes(runs.FLEET):
        shows = "Llama-2-70B beside three models, eight GPUs each, on the published Thursday."
        figures.append(_table(results, runs.FLEET, "Beside Figure 11", "Four models on equal GPUs", shows))
    if results.includes(SCOUT):
        figures += _scout(results)
    if results.includes(runs.ORDER):
        figures += _orderings(results)
    figures += _bursts(results)
    shows = "Llama-2-70B, all of a Thursday, starts of 155 s."
    for kind in (runs.NOVEMBER, runs.H100, runs.MIX_9, runs.MIX_1):
        if results.includes(kind):
            figures.append(_table(results, kind, "7.2.7", kind[0].upper() + kind[1:], shows))
    if results.includes(READING):
        figures += [_readings(results), _thetas(served)]
    return figures


def _silos(results: SageServeRuns) -> Exhibits:
    both = (SILOED, REACTIVE)
    lines = {
        f"{label}, {name}": _instances(results, PEAK, name, model)
        for model, label in ((scenes.BLOOM, "Bloom"), (LLAMA_2, "Llama-2"))
        for name in both
    }
    use = {name: [results.of_model(PEAK, name, "kv_use", model) for model in MODELS] for name in both}
    rows: list[Row] = []
    for key, label in (
        ("ttft_p95_s", "P95 TTFT (s)"),
        ("e2e_p95_s", "P95 E2E (s)"),
        ("instance_hours", "instance-hours"),
    ):
        values = [fmean(results.of_model(PEAK, name, key, model)) for model in MODELS for name in both]
        rows.append([label, *values])
    heads = ("", *(f"{model}, {name}" for model in MODELS for name in both))
    return [
        Figure(
            "Figure 8a",
            "Silos and one pool",
            "Instances in all regions, starting ones included; from 11:00 on.",
            charts.curves(lines, "hours", "instances"),
        ),
        Figure(
            "Figure 8b",
            "Memory in use",
            "KV cache in use, means over the time after the first hour.",
            charts.bars(list(MODELS), use, "share of the KV cache"),
        ),
        PaperTable("Table 1", "Tails of silos and of one pool", "Interactive tiers, means over seeds.", heads, rows),
    ]


def _day(results: SageServeRuns) -> Exhibits:
    names = (REACTIVE, *LONG_TERM)
    lines = {name: _instances(results, DAY, name) for name in names}
    hours = {
        name: [results.values((DAY, name), "models", LLAMA_2, "regions", region) for region in REGIONS]
        for name in names
    }
    use = {"KV use": [results.of_model(DAY, name, "kv_use") for name in names]}
    tails = {f"P{q}": [results.of_model(DAY, name, f"ttft_p{q}_s") for name in names] for q in (75, 90, 95, 99)}
    waste = {
        cause: [results.values((DAY, name), "models", LLAMA_2, "wasted", cause) for name in names] for cause in CAUSES
    }
    whole = "Llama-2-70B on the published Thursday, means over seeds; instances are those of all regions."
    return [
        Figure(
            "Figure 11",
            "Instances over the day",
            "Llama-2-70B in all regions, from Wednesday, 22:00, on.",
            charts.curves(lines, "hours", "instances"),
        ),
        Figure(
            "Figure 12a", "Instance-hours by region", "Of Llama-2-70B.", charts.bars(REGIONS, hours, "instance-hours")
        ),
        Figure("Figure 12b", "Memory in use", "KV cache in use, Llama-2-70B.", charts.bars(names, use, "share")),
        Figure("Figure 13a", "TTFT", "Interactive requests to Llama-2-70B.", charts.bars(names, tails, "s")),
        Figure(
            "Figure 13b",
            "Time wasted on starts, by cause",
            "New instances, reclaimed spot ones of the same model, redeployed ones of another.",
            charts.bars(names, waste, "instance-hours"),
        ),
        *(
            _table(results, kind, label, f"Starts of {start_s:g} s", whole)
            for kind, start_s in zip((runs.FASTER, DAY, runs.SLOWER), DELAYS_S, strict=True)
            if results.includes(kind)
            for label in ("Figures 11 to 13" if kind == DAY else "Beside Figure 11",)
        ),
    ]


def _scout(results: SageServeRuns) -> Exhibits:
    models = (*MODELS, scenes.SCOUT)
    by_measure = {
        key: {name: [results.of_model(SCOUT, name, key, model) for model in models] for name in runs.BOTH}
        for key in ("ttft_p90_s", "instance_hours")
    }
    return [
        Figure(
            "Figure 14a",
            "Five models: TTFT",
            "P90 of interactive requests.",
            charts.bars(models, by_measure["ttft_p90_s"], "s"),
        ),
        Figure(
            "Figure 14b",
            "Five models: instance-hours",
            "Of each model, in all regions.",
            charts.bars(models, by_measure["instance_hours"], "instance-hours"),
        ),
    ]


def _orderings(results: SageServeRuns) -> Exhibits:
    names = list(scenes.ORDERINGS)
    tiers = (("fast", "0"), ("normal", "1"))

    def by_tier(key: str, scale: float) -> dict[str, list[list[float]]]:
        return {
            label: [[scale * value for value in results.values((runs.ORDER, name), key, tier)] for name in names]
            for label, tier in tiers
        }

    late = f"First tokens later than 1 s (fast tier) and {orderings.NORMAL_TTFT_S:g} s (normal tier)."
    return [
        Figure(
            "Figure 15a", "Orderings: TTFT", "Third quartile of TTFT.", charts.bars(names, by_tier("q3_s", 1.0), "s")
        ),
        Figure(
            "Figure 15b", "Orderings: late", late, charts.bars(names, by_tier("violations", 100.0), "violations (%)")
        ),
    ]


def _bursts(results: SageServeRuns) -> Exhibits:
    figures: Exhibits = []
    if results.includes(runs.BURST):
        begins, ends = (at / 3600 for at in scenes.BURST_S)
        shows = f"Llama-2-70B. Eight times the load comes from {begins:.3g} h to {ends:.3g} h."
        instances = {name: _series(results, runs.BURST, name, "instances") for name in LONG_TERM}
        medians = {name: _series(results, runs.BURST, name, "minutes") for name in LONG_TERM}
        figures += [
            Figure("Figure 16a", "A burst: instances", shows, charts.curves(instances, "hours", "instances")),
            Figure(
                "Figure 16a",
                "A burst: waits",
                "Median TTFT of those who come in a minute.",
                charts.curves(medians, "minutes", "s", yaxis={"type": "log"}),
            ),
        ]
    if results.includes(runs.WEEK):
        bins = {name: _series(results, runs.WEEK, name, "bins") for name in results.names(runs.WEEK)}
        shows = "P95 TTFT of interactive requests to Llama-2-70B, by three hours, from Friday, 18:00, on."
        figures.append(Figure("Figure 16b", "The weekend begins", shows, charts.curves(bins, "hours", "s")))
    return figures


def _table(results: SageServeRuns, kind: str, label: str, title: str, shows: str) -> PaperTable:
    rows: list[Row] = [
        [name, *(_mean(results, kind, name, key) for key, _ in _COLUMNS)] for name in results.names(kind)
    ]
    if known := results.results.get((KNOWS, kind, results.seeds[0])):
        rows.append(["who knows the trace (one seed)", *(known["models"][LLAMA_2][key] for key, _ in _COLUMNS)])
    least = results.results.get((BOUND, kind, results.seeds[0]), {}).get("instance_hours")
    if least is not None:
        rows.append(["no plan goes below (one seed)", least, *[None] * (len(_COLUMNS) - 1)])
    return PaperTable(label, title, shows, ("", *(head for _, head in _COLUMNS)), rows)


def _mean(results: SageServeRuns, kind: str, name: str, key: str) -> float | None:
    """Llama-2's mean over the seeds that ran; None if a run has no value."""
    ran = [results.results[kind, name, seed] for seed in results.seeds if (kind, name, seed) in results.results]
    values = [each["models"][LLAMA_2][key] for each in ran]
    return None if None in values else fmean(values)


def _readings(results: SageServeRuns) -> PaperTable:
    columns = [(key, head) for key, head in _COLUMNS if key not in ("spot_hours", "batch_p95_s")]
    first = results.seeds[0]
    shows = (
        f"What the paper leaves open, one thing at a time: Llama-2-70B alone, Thursday, 11:00 to 13:00, seed {first}."
    )
    return _of_one_seed(results, READING, "Readings", "What instance-hours depend on", shows, columns)


def _of_one_seed(
    results: SageServeRuns, kind: str, label: str, title: str, shows: str, columns: Sequence[tuple[str, str]]
) -> PaperTable:
    rows: list[Row] = [
        [name, *(results.first(kind, name)["models"][LLAMA_2][key] for key, _ in columns)]
        for name in results.names(kind)
    ]
    return PaperTable(label, title, shows, ("", *(head for _, head in columns)), rows)


def _thetas(served: Mapping[str, Measurement]) -> PaperTable:
    rows: list[Row] = [
        [f"{model}, {gpu}", each["most"][model], runs.THETA_SHARE * each["most"][model], each["tps"][model]]
        for gpu, each in served.items()
        for model in each["most"]
    ]
    heads = ("", "flat out", "theta", "in time (95% within 1 s)")
    shows = "Input tokens per second of interactive requests that one instance serves, by simulation."
    return PaperTable("Table 2", "theta", shows, heads, rows)


def _instances(results: SageServeRuns, kind: str, name: str, model: str = LLAMA_2) -> list[tuple[float, list[float]]]:
    return _points(results.values((kind, name), "models", model, "instances"))


def _series(results: SageServeRuns, kind: str, name: str, key: str) -> list[tuple[float, list[float]]]:
    return _points(results.values((kind, name), key))


def _points(seeds: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, list[float]]]:
    return [(bins[0][0], [each[1] for each in bins]) for bins in zip(*seeds, strict=False)]
