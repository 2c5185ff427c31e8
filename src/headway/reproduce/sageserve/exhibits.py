"""SageServe's figures and tables, made anew, in the paper's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from headway.reproduce import charts
from headway.reproduce.findings import Figure, PaperTable
from headway.reproduce.sageserve import orderings, runs, scenes
from headway.reproduce.sageserve.measures import CAUSES
from headway.reproduce.sageserve.runs import ALONE, BOUND, DAY, KNOWS, LONG_TERM, PEAK, READING, SCOUT, WHOLE
from headway.reproduce.sageserve.scenes import LLAMA_2, MODELS, REACTIVE, REGIONS, SILOED
from headway.reproduce.sageserve.table import SageServeRuns
from headway.reproduce.tasks import Measurement

Exhibits = list[Figure | PaperTable]
_COLUMNS = (
    ("instance_hours", "instance-hours"), ("wasted_hours", "starting"), ("starts", "starts"),
    ("spot_hours", "spot hours"), ("kv_use", "KV use"), ("late", "late"), ("ttft_p90_s", "TTFT P90"),
    ("ttft_p95_s", "P95"), ("ttft_p99_s", "P99 (s)"),
)  # fmt: skip


def exhibits(kept: SageServeRuns, served: Mapping[str, Measurement]) -> Exhibits:
    made: Exhibits = []
    if kept.has(PEAK):
        made += _silos(kept)
    if kept.has(DAY):
        made += _day(kept)
    if kept.has(ALONE):
        shows = (
            "Llama-2-70B alone, on Thursday, 12:00 to 13:00. A leaked forecast is fitted on the day itself, and cheats."
        )
        made.append(_table(kept, ALONE, "Beside Figure 11", "All strategies at the peak", shows))
    if kept.has(SCOUT):
        made += _scout(kept)
    if kept.has(runs.ORDER):
        made += _orderings(kept)
    made += _bursts(kept)
    shows = "Llama-2-70B on Thursday, 12:00 to 13:00."
    for kind in (runs.NOVEMBER, runs.H100, runs.MIX_9, runs.MIX_1):
        if kept.has(kind):
            made.append(_table(kept, kind, "7.2.7", kind[0].upper() + kind[1:], shows))
    if kept.has(READING):
        shows = f"Llama-2-70B alone, all of Thursday after its first hour, seed {kept.seeds[0]}."
        day = _of_one_seed(kept, WHOLE, "A whole day", "Nights and all", shows, _COLUMNS)
        made += [day, _readings(kept), _thetas(served)]
    return made


def _silos(kept: SageServeRuns) -> Exhibits:
    both = (SILOED, REACTIVE)
    lines = {
        f"{label}, {name}": _instances(kept, PEAK, name, model)
        for model, label in ((scenes.BLOOM, "Bloom"), (LLAMA_2, "Llama-2")) for name in both
    }  # fmt: skip
    use = {name: [kept.llama(PEAK, name, "kv_use", model) for model in MODELS] for name in both}
    rows: list[list[str | float | None]] = []
    for key, label in (
        ("ttft_p95_s", "P95 TTFT (s)"),
        ("e2e_p95_s", "P95 E2E (s)"),
        ("instance_hours", "instance-hours"),
    ):
        values = [fmean(kept.llama(PEAK, name, key, model)) for model in MODELS for name in both]
        rows.append([label, *values])
    heads = ("", *(f"{model}, {name}" for model in MODELS for name in both))
    return [
        Figure("Figure 8a", "Silos and one pool", "Instances in all regions, starting ones included; from 11:00 on.",
               charts.curves(lines, "hours", "instances")),
        Figure("Figure 8b", "Memory in use", "KV cache in use, means over the time after the first hour.",
               charts.bars(list(MODELS), use, "share of the KV cache")),
        PaperTable("Table 1", "Tails of silos and of one pool", "Interactive tiers, means over seeds.", heads, rows),
    ]  # fmt: skip


def _day(kept: SageServeRuns) -> Exhibits:
    names = (REACTIVE, *LONG_TERM)
    lines = {name: _instances(kept, DAY, name) for name in names}
    hours = {
        name: [kept.values(DAY, name, lambda run, r=region: run["models"][LLAMA_2]["regions"][r]) for region in REGIONS]  # type: ignore[misc]
        for name in names
    }  # fmt: skip
    use = {"KV use": [kept.llama(DAY, name, "kv_use") for name in names]}
    tails = {f"P{q}": [kept.llama(DAY, name, f"ttft_p{q}_s") for name in names] for q in (75, 90, 95, 99)}
    waste = {
        cause: [kept.values(DAY, name, lambda run, c=cause: run["models"][LLAMA_2]["wasted"][c]) for name in names]  # type: ignore[misc]
        for cause in CAUSES
    }  # fmt: skip
    whole = "Llama-2-70B on Thursday, 11:00 to 16:00, means over seeds; instances are those of all regions."
    return [
        Figure("Figure 11", "Instances over the day", "Instances of Llama-2-70B in all regions, from 10:00 on.",
               charts.curves(lines, "hours", "instances")),
        Figure("Figure 12a", "Instance-hours by region", "Of Llama-2-70B.",
               charts.bars(REGIONS, hours, "instance-hours")),
        Figure("Figure 12b", "Memory in use", "KV cache in use, Llama-2-70B.", charts.bars(names, use, "share")),
        Figure("Figure 13a", "TTFT", "Interactive requests to Llama-2-70B.", charts.bars(names, tails, "s")),
        Figure("Figure 13b", "Time wasted on starts, by cause",
               "New instances, reclaimed spot ones of the same model, redeployed ones of another.",
               charts.bars(names, waste, "instance-hours")),
        _table(kept, DAY, "Figures 11 to 13", "Strategies over the day", whole),
    ]  # fmt: skip


def _scout(kept: SageServeRuns) -> Exhibits:
    models = (*MODELS, scenes.SCOUT)
    found = {
        key: {name: [kept.llama(SCOUT, name, key, model) for model in models] for name in runs.BOTH}
        for key in ("ttft_p90_s", "instance_hours")
    }
    return [
        Figure("Figure 14a", "Five models: TTFT", "P90 of interactive requests.",
               charts.bars(models, found["ttft_p90_s"], "s")),
        Figure("Figure 14b", "Five models: instance-hours", "Of each model, in all regions.",
               charts.bars(models, found["instance_hours"], "instance-hours")),
    ]  # fmt: skip


def _orderings(kept: SageServeRuns) -> Exhibits:
    names = list(scenes.ORDERINGS)
    tiers = (("fast", "0"), ("normal", "1"))

    def of(key: str, scale: float) -> dict[str, list[list[float]]]:
        return {
            label: [kept.values(runs.ORDER, name, lambda run, t=tier: scale * run[key][t]) for name in names]  # type: ignore[misc]
            for label, tier in tiers
        }  # fmt: skip

    late = f"First tokens later than 1 s (fast tier) and {orderings.NORMAL_TTFT_S:g} s (normal tier)."
    return [
        Figure("Figure 15a", "Orderings: TTFT", "Third quartile of TTFT.", charts.bars(names, of("q3_s", 1.0), "s")),
        Figure("Figure 15b", "Orderings: late", late, charts.bars(names, of("violations", 100.0), "violations (%)")),
    ]


def _bursts(kept: SageServeRuns) -> Exhibits:
    made: Exhibits = []
    if kept.has(runs.BURST):
        begins, ends = (at / 3600 for at in scenes.BURST_S)
        shows = f"Llama-2-70B. Eight times the load comes from {begins:.3g} h to {ends:.3g} h."
        instances = {name: _series(kept, runs.BURST, name, "instances") for name in LONG_TERM}
        medians = {name: _series(kept, runs.BURST, name, "minutes") for name in LONG_TERM}
        made += [
            Figure("Figure 16a", "A burst: instances", shows, charts.curves(instances, "hours", "instances")),
            Figure("Figure 16a", "A burst: waits", "Median TTFT of those who come in a minute.",
                   charts.curves(medians, "minutes", "s", yaxis={"type": "log"})),
        ]  # fmt: skip
    if kept.has(runs.WEEK):
        bins = {name: _series(kept, runs.WEEK, name, "bins") for name in kept.names(runs.WEEK)}
        shows = "P95 TTFT of interactive requests to Llama-2-70B, by three hours, from Friday, 18:00, on."
        made.append(Figure("Figure 16b", "The weekend begins", shows, charts.curves(bins, "hours", "s")))
    return made


def _table(kept: SageServeRuns, kind: str, label: str, title: str, shows: str) -> PaperTable:
    rows: list[list[str | float | None]] = [
        [name, *(fmean(kept.llama(kind, name, key)) for key, _ in _COLUMNS)] for name in kept.names(kind)
    ]
    if kept.has(KNOWS, kind) and all(kept.values(KNOWS, kind, bool)):
        rows.append(["who knows the trace", *(fmean(kept.llama(KNOWS, kind, key)) for key, _ in _COLUMNS)])
    if kept.has(BOUND, kind):
        hours = kept.values(BOUND, kind, lambda run: run["instance_hours"])
        if None not in hours:
            rows.append(["no plan goes below", fmean(hours), *[None] * (len(_COLUMNS) - 1)])
    return PaperTable(label, title, shows, ("", *(head for _, head in _COLUMNS)), rows)


def _readings(kept: SageServeRuns) -> PaperTable:
    columns = [(key, head) for key, head in _COLUMNS if key != "spot_hours"]
    first = kept.seeds[0]
    shows = (
        f"What the paper leaves open, one thing at a time: Llama-2-70B alone, Thursday, 11:00 to 13:00, seed {first}."
    )
    return _of_one_seed(kept, READING, "Readings", "What instance-hours depend on", shows, columns)


def _of_one_seed(
    kept: SageServeRuns, kind: str, label: str, title: str, shows: str, columns: Sequence[tuple[str, str]]
) -> PaperTable:
    rows: list[list[str | float | None]] = [
        [name, *(kept.one(kind, name)["models"][LLAMA_2][key] for key, _ in columns)] for name in kept.names(kind)
    ]
    return PaperTable(label, title, shows, ("", *(head for _, head in columns)), rows)


def _thetas(served: Mapping[str, Measurement]) -> PaperTable:
    rows: list[list[str | float | None]] = [
        [f"{model}, {gpu}", each["most"][model], runs.THETA_SHARE * each["most"][model], each["tps"][model]]
        for gpu, each in served.items() for model in each["most"]
    ]  # fmt: skip
    heads = ("", "flat out", "theta", "in time (95% within 1 s)")
    shows = "Input tokens per second of interactive requests that one instance serves, by simulation."
    return PaperTable("Table 2", "theta", shows, heads, rows)


def _instances(kept: SageServeRuns, kind: str, name: str, model: str = LLAMA_2) -> list[tuple[float, list[float]]]:
    return _points(kept.values(kind, name, lambda run: run["models"][model]["instances"]))


def _series(kept: SageServeRuns, kind: str, name: str, key: str) -> list[tuple[float, list[float]]]:
    return _points(kept.values(kind, name, lambda run: run[key]))


def _points(seeds: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, list[float]]]:
    return [(bins[0][0], [each[1] for each in bins]) for bins in zip(*seeds, strict=False)]
