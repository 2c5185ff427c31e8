"""The HTML report of one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from headway.catalog.coefficients import versions_notes
from headway.core.errors import HeadwayError
from headway.metrics.seeds import SeededMetrics
from headway.metrics.summary import RequestMetrics, flatten
from headway.report import charts, dots
from headway.report.describe import DEFINITIONS
from headway.report.page import COLORS, DRAW, chart, document, facts, literal, table, write_page
from headway.report.run import Provenance, Run, named_by_policies
from headway.report.table import (
    COLUMNS,
    Cell,
    compare,
    energy_notes,
    error_notes,
    seconds,
    seeds_note,
    short_number,
    uncalibrated_note,
)

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
  Plotly.react("replicas", figure.data, themed(figure.layout), config);
}
if (run) { run.addEventListener("change", showReplicas); quantity.addEventListener("change", showReplicas);
  showReplicas(); }
"""
"""Script that hides runs and switches the replica heatmap."""

BEST_CELL = '<td class="best">'
MOST_COLUMNS, MOST_INTERVALS = 15, 11
"""Maximum number of columns of the comparison, so that it fits a laptop screen. Intervals are wider than values."""


def write(runs: Sequence[Run], provenance: Provenance, path: Path, seeded: SeededMetrics | None = None) -> None:
    """Write the report to `path`, as `write_page` does."""
    write_page(path, page(runs, provenance, seeded))


def page(runs: Sequence[Run], provenance: Provenance, seeded: SeededMetrics | None = None) -> str:
    """Return the page. Raises HeadwayError if there are no runs."""
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
    if len(runs) > 1:
        figures["decision"] = dots.figure([run.name for run in runs], several)
    timelines = charts.replica_heatmaps(runs)
    body = "\n".join(
        [
            _header(title, runs, provenance),
            _decision(runs, several) if len(runs) > 1 else "",
            _comparison(runs, seeded),
            _chips(runs),
            _latency(figures),
            _model_error(runs, figures),
            _load(figures),
            _pools(figures),
            _replicas(runs),
            _breakdowns(runs, figures),
            _footer(provenance),
        ]
    )
    data = f"const charts = {literal(figures)};\nconst replicas = {literal(timelines)};"
    return document(title, body, f"{data}\n{DRAW}{JS}")


def _title(runs: Sequence[Run]) -> str:
    names = {run.name for run in runs}
    if len(runs) == 1:
        return runs[0].name
    return f"{names.pop()}: {len(runs)} runs" if len(names) == 1 else f"Comparison of {len(runs)} runs"


def _header(title: str, runs: Sequence[Run], provenance: Provenance) -> str:
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
    return "\n".join(
        [
            '<header>\n<div class="brand">Headway</div>',
            f"<h1>{escape(title)}</h1>",
            facts(about),
            *(f'<p class="note">{escape(note)}</p>' for note in notes),
            "</header>",
        ]
    )


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


def _swatch(run: int) -> str:
    return f'<span class="swatch" style="background:{COLORS[run % len(COLORS)]}"></span>'


def _comparison(runs: Sequence[Run], seeded: SeededMetrics | None) -> str:
    has_intervals = seeded is not None and seeded.varies
    compared = compare(runs, seeded).limited_to(MOST_INTERVALS if has_intervals else MOST_COLUMNS)
    rows = []
    for index, (label, cells) in enumerate(zip(compared.labels, compared.cells, strict=True)):
        names = "".join(
            f'<td class="name">{_swatch(index) if i == 0 else ""}{escape(text)}</td>' for i, text in enumerate(label)
        )
        values = "".join(f"{_cell_tag(cell)}{escape(cell.text)}</td>" for cell in cells)
        rows.append(names + values)
    heads = [*compared.kinds, *(column.title for column in compared.columns)]
    every = [cell for row in compared.cells for cell in row]
    words = [seeds_note(seeded)] if seeded is not None else []
    words += ["The best value of a column is green."] if any(cell.best for cell in every) else []
    if any(cell.same for cell in every):
        words.append(
            "Values that are not distinguishable from the best by their differences seed by seed are underlined."
        )
    legend = f'<p class="quiet">{escape(" ".join(words))}</p>' if words else ""
    return f"<section>\n<h2>Summary</h2>\n{legend}{table(heads, range(len(compared.kinds)), rows)}\n</section>"


def _cell_tag(cell: Cell) -> str:
    return BEST_CELL if cell.best else '<td class="same">' if cell.same else "<td>"


def _chips(runs: Sequence[Run]) -> str:
    """A legend for all charts. A click hides a run."""
    if len(runs) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="true">{_swatch(i)}{escape(run.name)}</button>'
        for i, run in enumerate(runs)
    )
    return f'<nav class="chips" aria-label="Runs shown">{buttons}</nav>'


def _latency(figures: dict[str, charts.Figure]) -> str:
    titles = {
        "ttft": ("Time to first token", "Share of requests within a time; up and left is better."),
        "itl": ("Inter-token latency", "Share of all gaps between tokens within a time."),
        "e2e": ("End-to-end latency", "Share of finished requests within a time."),
    }
    shown = "".join(chart(name, *words) for name, words in titles.items() if name in figures)
    content = f'<div class="grid">{shown}</div>' if shown else '<p class="quiet">No request got a token.</p>'
    return f"<section>\n<h2>Latency</h2>\n{content}\n</section>"


def _load(figures: dict[str, charts.Figure]) -> str:
    titles = {
        "waiting": ("Waiting", "Requests in the system and in no batch, means over short spans."),
        "running": ("Running", "Requests in a batch, over all replicas, means over short spans."),
        "kv": ("KV use", "KV tokens of decoding requests as a share of capacity, over replicas that are up."),
        "progress": ("Arrivals and completions", "Dotted: arrived. A growing distance is a growing backlog."),
    }
    shown = "".join(chart(name, *words) for name, words in titles.items() if name in figures)
    return f'<section>\n<h2>Load over time</h2>\n<div class="grid two">{shown}</div>\n</section>'


def _decision(runs: Sequence[Run], seeded: SeededMetrics) -> str:
    """The first chart: the tail latency and the cost of every run, and the conclusion."""
    sentence = dots.verdict([run.name for run in runs], seeded, dots.KEYS[0])
    bars = " Bars are 95% intervals over seeds." if seeded.varies else ""
    caption = f"Further left is better.{bars}"
    picture = chart("decision", "Tail and cost", caption)
    return f'<section>\n<p class="verdict">{escape(sentence)}</p>\n{picture}\n</section>'


def _model_error(runs: Sequence[Run], figures: dict[str, charts.Figure]) -> str:
    if "model-error" not in figures:
        return ""
    notes = "".join(f'<p class="quiet">{escape(line)}</p>' for line in error_notes(runs) + energy_notes(runs))
    picture = chart(
        "model-error", "Latencies and the error of the step times", "Bars: 9 of 10 measured runs, by class."
    )
    return f"<section>\n<h2>How sure these latencies are</h2>\n{notes}\n{picture}\n</section>"


def _pools(figures: dict[str, charts.Figure]) -> str:
    titles = {
        "pool-ttft_s": ("Time to first token by pool, p99", "Of the requests that ended in the pool."),
        "pool-e2e_s": ("End-to-end latency by pool, p99", "Of the requests that ended in the pool."),
        "share": ("Requests by replica", "Share of the requests that ended at each replica."),
    }
    shown = "".join(chart(name, *words) for name, words in titles.items() if name in figures)
    return f'<section>\n<h2>Pools and replicas</h2>\n<div class="grid two">{shown}</div>\n</section>' if shown else ""


def _replicas(runs: Sequence[Run]) -> str:
    names = "".join(f'<option value="{i}">{escape(run.name)}</option>' for i, run in enumerate(runs))
    kinds = "".join(f'<option value="{key}">{name}</option>' for key, (name, _) in charts.QUANTITIES.items())
    return (
        "<section>\n<h2>Replicas</h2>\n"
        '<p class="quiet">Means over short spans of time, one row per replica, on one scale for all runs. '
        "White: down, or not there.</p>\n"
        f'<div class="choices"><select id="replica-run" aria-label="Run">{names}</select>'
        f'<select id="replica-quantity" aria-label="Quantity">{kinds}</select></div>\n'
        '<div class="chart" id="replicas"></div>\n</section>'
    )


def _breakdowns(runs: Sequence[Run], figures: dict[str, charts.Figure]) -> str:
    parts = []
    bars = {"tier-ttft_s": "Time to first token, p99", "tier-e2e_s": "End-to-end latency, p99"}
    shown = "".join(
        chart(name, title, "By tier; 0 is the most urgent.") for name, title in bars.items() if name in figures
    )
    for kind, title in (("tiers", "Tiers"), ("models", "Models"), ("regions", "Regions"), ("tenants", "Tenants")):
        groups = list(dict.fromkeys(name for run in runs for name in getattr(run.summary, kind)))
        if not groups:
            continue
        plots = f'<div class="grid two">{shown}</div>' if kind == "tiers" else ""
        parts.append(f"<section>\n<h2>{title}</h2>\n{plots}{_breakdown(runs, kind, sorted(groups))}\n</section>")
    return "\n".join(parts)


_BREAKDOWN_KEYS = (
    "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "itl_s.p99", "e2e_s.mean", "e2e_s.p99", "slo_attainment",
    "throughput_rps", "num_unfinished", "num_rejected",
    "refused_by_requests_per_minute", "refused_by_tokens_per_minute", "refused_by_budget",
)  # fmt: skip


def _breakdown(runs: Sequence[Run], kind: str, groups: Sequence[str]) -> str:
    present = {key for run in runs for key in flatten(run.summary, replicas=False)}
    columns = [column for column in COLUMNS if column.key in _BREAKDOWN_KEYS and column.key in present]
    rows = []
    for group in groups:
        for index, run in enumerate(runs):
            metrics: RequestMetrics | None = getattr(run.summary, kind).get(group)
            if metrics is None:
                continue
            flat = flatten(metrics)
            values = [(column, flat.get(column.key)) for column in columns]
            cells = "".join(f"<td>{'-' if v is None else escape(column.show(v))}</td>" for column, v in values)
            rows.append(
                f'<td class="name">{escape(group)}</td>'
                f'<td class="name">{_swatch(index)}{escape(run.name)}</td>'
                f"<td>{metrics.num_requests:,}</td>{cells}"
            )
    return table([kind.removesuffix("s"), "run", "requests", *(column.title for column in columns)], (0, 1), rows)


def _footer(provenance: Provenance) -> str:
    definitions = [
        f'<td class="name"><code>{key}</code></td><td class="name">{escape(unit)}</td>'
        f'<td class="text">{escape(meaning)}</td>'
        for key, (unit, meaning) in DEFINITIONS.items()
    ]
    command = f"<p class='quiet'>Command: <code>{escape(provenance.command)}</code></p>" if provenance.command else ""
    meanings = table(["key", "unit", "definition"], (0, 1, 2), definitions)
    return (
        f"<footer>\n{command}"
        f"<details><summary>Scenario</summary><pre>{escape(provenance.scenario_yaml)}</pre></details>\n"
        f"<details><summary>What the metrics mean</summary>{meanings}</details>\n</footer>"
    )
