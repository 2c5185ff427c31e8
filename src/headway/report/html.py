"""The HTML report of one or several runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Literal

from headway.catalog.coefficients import versions_notes
from headway.core.errors import HeadwayError
from headway.metrics.seeds import SeededMetrics
from headway.metrics.summary import RequestMetrics, flatten
from headway.report import charts, dots, render
from headway.report.blocks import Block, Chart, Charts, Code, Facts, Folded, Lines, Raw, Report, Section, Table, or_dash
from headway.report.describe import DEFINITIONS
from headway.report.page import COLORS, literal, write_page
from headway.report.run import Provenance, Run, named_by_policies
from headway.report.table import (
    COLUMNS,
    compare,
    energy_notes,
    error_notes,
    seconds,
    seeds_note,
    short_number,
    uncalibrated_note,
)

Figures = Mapping[str, charts.Figure]

JS = """
const hidden = new Set();
function showRuns() {
  for (const [id, figure] of Object.entries(charts)) {
    const traces = figure.data.map((trace, i) => i).filter(i => figure.data[i].meta !== undefined);
    const visible = traces.map(i => !hidden.has(figure.data[i].meta));
    if (traces.length) Plotly.restyle(id, {visible}, traces);
  }
}
for (const button of document.querySelectorAll(".chips button")) button.addEventListener("click", () => {
  const run = Number(button.dataset.run), off = !hidden.has(run);
  if (off) hidden.add(run); else hidden.delete(run);
  button.setAttribute("aria-pressed", String(!off));
  showRuns();
});
const run = document.getElementById("replica-run"), quantity = document.getElementById("replica-quantity");
function showReplicas() {
  const figure = replicas[run.value][quantity.value];
  draw("replicas", figure);
}
if (run) { run.addEventListener("change", showReplicas); quantity.addEventListener("change", showReplicas);
  showReplicas(); }
"""
"""Script that hides runs and switches the replica heatmap."""

MOST_COLUMNS, MOST_INTERVALS = 15, 11
"""Maximum number of columns of the comparison, so that it fits a laptop screen. Intervals are wider than values."""


def write(runs: Sequence[Run], provenance: Provenance, path: Path, seeded: SeededMetrics | None = None) -> None:
    """Write the report to `path`, as `write_page` does."""
    write_page(path, page(runs, provenance, seeded))


def page(runs: Sequence[Run], provenance: Provenance, seeded: SeededMetrics | None = None) -> str:
    """Return the page. HeadwayError if there are no runs."""
    return render.page(report(runs, provenance, seeded), provenance.command)


def report(runs: Sequence[Run], provenance: Provenance, seeded: SeededMetrics | None = None) -> Report:
    """The report. HeadwayError if there are no runs."""
    if not runs:
        raise HeadwayError("a report needs at least one run")
    title = _title(runs)
    runs = named_by_policies(runs)
    several = (
        SeededMetrics((provenance.seed,), tuple((flatten(run.summary, replicas=False),) for run in runs))
        if seeded is None
        else seeded
    )
    figures = (
        charts.model_error(runs)
        | charts.distributions(runs)
        | charts.over_time(runs)
        | charts.tiers(runs)
        | charts.pools(runs)
    )
    body = [
        *([_decision(runs, several)] if len(runs) > 1 else []),
        _comparison(runs, seeded),
        *([_chips(runs)] if len(runs) > 1 else []),
        Section("Latency", _grid(figures, LATENCY, "No request got a token.")),
        *_model_error(runs, figures),
        Section("Load over time", _grid(figures, LOAD, wide=True)),
        *([Section("Pools and replicas", pools)] if (pools := _grid(figures, POOLS, wide=True)) else []),
        _replicas(runs),
        *_breakdowns(runs, figures),
    ]
    timelines = charts.replica_heatmaps(runs)
    script = f"const replicas = {literal(timelines)};\n{JS}"
    return Report("", title, _head(runs, provenance), body, end=_end(provenance), title=title, script=script)


def _title(runs: Sequence[Run]) -> str:
    names = {run.name for run in runs}
    if len(runs) == 1:
        return runs[0].name
    return f"{names.pop()}: {len(runs)} runs" if len(names) == 1 else f"Comparison of {len(runs)} runs"


def _head(runs: Sequence[Run], provenance: Provenance) -> list[Block]:
    first = runs[0]
    about = {
        "Requests": f"{first.summary.num_requests:,}",
        "Replicas": _fleet(first),
        "Simulated time": _span(first.records.end_s),
        "Simulated in": seconds(sum(run.simulate_s for run in runs)),
        "Seed": str(provenance.seed),
        "Headway": provenance.version,
    }
    if first.summary.warmup_s:
        about["Warm-up left out"] = _span(first.summary.warmup_s)
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    if (uncalibrated := uncalibrated_note(runs)) is not None:
        notes.insert(0, uncalibrated)
    notes += versions_notes((pool.engine, pool.version) for run in runs for pool in run.pools)
    return [Facts(about), Lines(notes, "note")]


def _fleet(run: Run) -> str:
    """The replicas of a run, such as "4 x llama-3.1-8b on a100-80gb"."""
    counts: dict[tuple[str, str, int], int] = {}
    for replica in run.records.replicas:
        shape = (replica.model, replica.gpu, replica.num_gpus)
        counts[shape] = counts.get(shape, 0) + 1
    shapes = [
        f"{number} × {model} on {f'{gpus} × ' if gpus > 1 else ''}{gpu}"
        for (model, gpu, gpus), number in counts.items()
    ]
    return ", ".join(shapes[:4]) + (f" and {len(shapes) - 4} more" if len(shapes) > 4 else "")


def _span(span_s: float) -> str:
    unit_s, unit = charts.time_unit(span_s)
    return f"{short_number(span_s / unit_s)} {unit}"


def _color(run: int) -> str:
    return COLORS[run % len(COLORS)]


def _comparison(runs: Sequence[Run], seeded: SeededMetrics | None) -> Section:
    has_intervals = seeded is not None and seeded.varies
    compared = compare(runs, seeded).limited_to(MOST_INTERVALS if has_intervals else MOST_COLUMNS)
    num = len(compared.kinds)
    rows = [
        [*label, *(cell.text for cell in cells)] for label, cells in zip(compared.labels, compared.cells, strict=True)
    ]
    marks: dict[tuple[int, int], Literal["best", "same"]] = {
        (i, num + j): "best" if cell.best else "same"
        for i, cells in enumerate(compared.cells)
        for j, cell in enumerate(cells)
        if cell.best or cell.same
    }
    heads = [*compared.kinds, *(column.title for column in compared.columns)]
    words = [seeds_note(seeded)] if seeded is not None else []
    words += ["The best value of a column is green."] if "best" in marks.values() else []
    if "same" in marks.values():
        words.append(
            "Values that are not distinguishable from the best by their differences seed by seed are underlined."
        )
    colors = (0, [_color(i) for i in range(len(runs))])
    table = Table(heads, rows, words=range(num), marks=marks, colors=colors)
    return Section("Summary", [*([Lines([" ".join(words)], "quiet")] if words else []), table])


def _chips(runs: Sequence[Run]) -> Raw:
    """A legend for all charts; a click hides a run."""
    names = [f"{render.swatch(_color(i))}{escape(run.name)}" for i, run in enumerate(runs)]
    buttons = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="true">{name}</button>' for i, name in enumerate(names)
    )
    return Raw(f'<nav class="chips" aria-label="Runs shown">{buttons}</nav>')


Titles = Mapping[str, tuple[str, str]]
"""Title and caption of each chart."""
LATENCY: Titles = {
    "ttft": ("Time to first token", "Share of requests within a time; up and left is better."),
    "itl": ("Inter-token latency", "Share of all gaps between tokens within a time."),
    "e2e": ("End-to-end latency", "Share of finished requests within a time."),
}
LOAD: Titles = {
    "waiting": ("Waiting", "Requests in the system and in no batch, means over short spans."),
    "running": ("Running", "Requests in a batch, over all replicas, means over short spans."),
    "kv": ("KV use", "KV tokens of decoding requests as a share of capacity, over replicas that are up."),
    "progress": ("Arrivals and completions", "Dotted: arrived. A growing distance is a growing backlog."),
}
POOLS: Titles = {
    "pool-ttft_s": ("Time to first token by pool, p99", "Of the requests that ended in the pool."),
    "pool-e2e_s": ("End-to-end latency by pool, p99", "Of the requests that ended in the pool."),
    "share": ("Requests by replica", "Share of the requests that ended at each replica."),
}
TIERS: Titles = {
    "tier-ttft_s": ("Time to first token, p99", "By tier; 0 is the most urgent."),
    "tier-e2e_s": ("End-to-end latency, p99", "By tier; 0 is the most urgent."),
}


def _grid(figures: Figures, titles: Titles, without: str = "", wide: bool = False) -> list[Block]:
    """The available charts, side by side; if there is none, the line `without`."""
    shown = [Chart(name, title, figures[name], caption) for name, (title, caption) in titles.items() if name in figures]
    return [Charts(shown, wide)] if shown else [Lines([without], "quiet")] if without else []


def _decision(runs: Sequence[Run], seeded: SeededMetrics) -> Section:
    """The first picture: the tail and the cost of every run, and what follows."""
    names = [run.name for run in runs]
    bars = " Bars are 95% intervals over seeds." if seeded.varies else ""
    picture = Chart("decision", "Tail and cost", dots.figure(names, seeded), f"Further left is better.{bars}")
    return Section("", [Lines([dots.verdict(names, seeded, dots.KEYS[0])], "verdict"), picture])


def _model_error(runs: Sequence[Run], figures: Figures) -> Iterator[Section]:
    if "model-error" in figures:
        title = "Latencies and the error of the step times"
        picture = Chart("model-error", title, figures["model-error"], "Bars: 9 of 10 measured runs, by class.")
        notes = Lines(error_notes(runs) + energy_notes(runs), "quiet")
        yield Section("How sure these latencies are", [notes, picture])


def _replicas(runs: Sequence[Run]) -> Section:
    names = "".join(f'<option value="{i}">{escape(run.name)}</option>' for i, run in enumerate(runs))
    kinds = "".join(f'<option value="{key}">{name}</option>' for key, (name, _) in charts.QUANTITIES.items())
    about = "Means over short spans of time, one row per replica, on one scale for all runs. White: down, or not there."
    choices = (
        f'<div class="choices"><select id="replica-run" aria-label="Run">{names}</select>'
        f'<select id="replica-quantity" aria-label="Quantity">{kinds}</select></div>\n'
        '<div class="chart" id="replicas"></div>'
    )
    return Section("Replicas", [Lines([about], "quiet"), Raw(choices)])


def _breakdowns(runs: Sequence[Run], figures: Figures) -> Iterator[Section]:
    for kind, title in (("tiers", "Tiers"), ("models", "Models"), ("regions", "Regions"), ("tenants", "Tenants")):
        groups = list(dict.fromkeys(name for run in runs for name in getattr(run.summary, kind)))
        if groups:
            plots = _grid(figures, TIERS, wide=True) if kind == "tiers" else []
            yield Section(title, [*plots, _breakdown(runs, kind, sorted(groups))])


_BREAKDOWN_KEYS = (
    "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "itl_s.p99", "e2e_s.mean", "e2e_s.p99", "slo_attainment",
    "throughput_rps", "num_unfinished", "num_rejected",
    "refused_by_requests_per_minute", "refused_by_tokens_per_minute", "refused_by_budget",
)  # fmt: skip


def _breakdown(runs: Sequence[Run], kind: str, groups: Sequence[str]) -> Table:
    present = {key for run in runs for key in flatten(run.summary, replicas=False)}
    columns = [column for column in COLUMNS if column.key in _BREAKDOWN_KEYS and column.key in present]
    rows, colors = list[list[str]](), list[str]()
    for group in groups:
        for index, run in enumerate(runs):
            metrics: RequestMetrics | None = getattr(run.summary, kind).get(group)
            if metrics is None:
                continue
            flat = flatten(metrics)
            cells = [or_dash(flat.get(column.key), column.show) for column in columns]
            rows.append([group, run.name, f"{metrics.num_requests:,}", *cells])
            colors.append(_color(index))
    heads = [kind.removesuffix("s"), "run", "requests", *(column.title for column in columns)]
    return Table(heads, rows, words=(0, 1), colors=(1, colors))


def _end(provenance: Provenance) -> list[Block]:
    definitions = [[f"`{key}`", unit, meaning] for key, (unit, meaning) in DEFINITIONS.items()]
    meanings = Table(("key", "unit", "definition"), definitions, words=(0, 1), prose=(2,))
    return [Folded("Scenario", Code(provenance.scenario_yaml)), Folded("What the metrics mean", meanings)]
