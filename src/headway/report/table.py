"""The comparison of several runs as a terminal table: one row per run, with the best value of each column marked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.markup import escape
from rich.table import Table

from headway.catalog.coefficients import versions_notes
from headway.catalog.errors import Band, ErrorClass
from headway.metrics.latency import sample, slo_ranges
from headway.metrics.seeds import Estimate, SeededMetrics, Verdict
from headway.metrics.summary import flatten
from headway.report.blocks import or_dash
from headway.report.model_error import SHOWN
from headway.report.render import printed
from headway.report.run import Run


@dataclass(frozen=True, slots=True)
class Column:
    """One metric in a comparison. `better` is "low", "high" or "" (neither)."""

    key: str
    title: str
    better: str
    show: Callable[[float], str]


def short_number(value: float) -> str:
    """Three significant digits, with thousands separated."""
    size = abs(value)
    if value == int(value) or size >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def seconds(value: float) -> str:
    """A duration with its unit: ms below one second."""
    if value == 0:
        return "0 s"
    return f"{short_number(1000 * value)} ms" if abs(value) < 0.9995 else f"{short_number(value)} s"


def percent(value: float) -> str:
    return "100%" if value == 1 else f"{100 * value:.1f}%"


def dollars(value: float) -> str:
    return f"${value:,.2f}" if abs(value) >= 1 or value == 0 else f"${value:.3g}"


COLUMNS = (
    Column("ttft_s.p50", "TTFT p50", "low", seconds),
    Column("ttft_s.p99", "TTFT p99", "low", seconds),
    Column("answer_s.p99", "answer p99", "low", seconds),
    Column("blocking_s.p99", "blocked p99", "low", seconds),
    Column("qoe_violations", "QoE missed", "low", percent),
    Column("tpot_s.mean", "TPOT mean", "low", seconds),
    Column("itl_s.p99", "ITL p99", "low", seconds),
    Column("quality", "quality", "high", short_number),
    Column("judged", "judged", "", short_number),
    Column("e2e_s.mean", "E2E mean", "low", seconds),
    Column("e2e_s.p99", "E2E p99", "low", seconds),
    Column("slo_attainment", "SLO met", "high", percent),
    Column("program_s.mean", "program mean", "low", seconds),
    Column("program_slo_attainment", "programs met", "high", percent),
    Column("goodput_rps", "goodput/s", "high", short_number),
    Column("throughput_rps", "req/s", "high", short_number),
    Column("output_tokens_per_s", "tok/s", "high", short_number),
    Column("kv_use.mean", "KV", "", percent),
    Column("cached_prompt_share", "cached", "high", percent),
    Column("preemptions", "preempted", "low", short_number),
    Column("moves", "moved", "", short_number),
    Column("retries", "retried", "low", short_number),
    Column("num_unfinished", "unfinished", "low", short_number),
    Column("num_rejected", "rejected", "low", short_number),
    Column("refused_by_requests_per_minute", "over req/min", "", short_number),
    Column("refused_by_tokens_per_minute", "over tok/min", "", short_number),
    Column("refused_by_budget", "over budget", "", short_number),
    Column("num_cancelled", "cancelled", "low", short_number),
    Column("gpu_hours", "GPU h", "low", short_number),
    Column("gpu_hours_bound", "bound", "", short_number),
    Column("gpu_hours_clairvoyant", "clairvoyant", "", short_number),
    Column("usd_per_million_output_tokens", "$/M tok", "low", dollars),
    Column("joules_per_output_token", "J/tok", "low", short_number),
)
"""Columns in display order."""

_REFUSED = ("refused_by_requests_per_minute", "refused_by_tokens_per_minute", "refused_by_budget")
ONLY_IF_NONZERO = {
    "cached_prompt_share",
    "preemptions",
    "moves",
    "retries",
    "num_unfinished",
    "num_rejected",
    "num_cancelled",
    "judged",
    "usd_per_million_output_tokens",
    *_REFUSED,
}

ONLY_WITH = {"gpu_hours": "gpu_hours_bound"}
"""Maps a column to the column without which it is not shown."""

DROPPED_FIRST = (
    "joules_per_output_token", "judged", "kv_use.mean", "e2e_s.p99", "retries", "output_tokens_per_s",
    "cached_prompt_share", "moves", "preemptions", "ttft_s.p50", "throughput_rps",
    "usd_per_million_output_tokens", "goodput_rps", "tpot_s.mean",
    "blocking_s.p99", "answer_s.p99", "itl_s.p99", "qoe_violations", "slo_attainment", "e2e_s.mean",
)  # fmt: skip
"""Columns that a narrow console drops, in order. Counts of unfinished requests are always shown."""

GROUP_COLUMNS = ("ttft_s.p50", "ttft_s.p99", "itl_s.p99", "e2e_s.p99", "slo_attainment", "throughput_rps",
                  "output_tokens_per_s", "num_unfinished", "num_rejected", *_REFUSED)  # fmt: skip
"""Columns of the tables by tier and by tenant."""
MOST_GROUP_ROWS = 24
"""Maximum number of rows of a table of tiers or tenants. Larger tables are left out, because the JSON and the HTML
report contain all tiers and tenants."""

UNCALIBRATED = "Step times are not calibrated for this GPU and engine: trust the order, not the numbers."


def uncalibrated_note(runs: Sequence[Run]) -> str | None:
    """The pools without calibrated step times, and why; None if all are calibrated."""
    if all(run.calibrated for run in runs):
        return None
    pools = list(dict.fromkeys(pool for run in runs for pool in run.uncalibrated))
    if not pools:
        return UNCALIBRATED
    shown = ", ".join(pools[:4]) + (f" and {len(pools) - 4} more pools" if len(pools) > 4 else "")
    return f"Step times are not calibrated for {shown}: trust the order, not the numbers."


SAME_WITHIN = 0.005
"""No run is marked as best if all runs are within this relative difference."""

BEST, SAME = "*", "="


@dataclass(frozen=True, slots=True)
class Cell:
    """The text of one metric of one run, and whether it is the best."""

    text: str
    best: bool
    same: bool = False
    """With several seeds: whether it is indistinguishable from the best, or is the best but not alone."""


@dataclass(frozen=True, slots=True)
class ComparedMetrics:
    kinds: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    columns: tuple[Column, ...]
    cells: tuple[tuple[Cell, ...], ...]

    def without(self, dropped: Collection[str]) -> ComparedMetrics:
        remaining = [i for i, column in enumerate(self.columns) if column.key not in dropped]
        return ComparedMetrics(
            self.kinds,
            self.labels,
            tuple(self.columns[i] for i in remaining),
            tuple(tuple(row[i] for i in remaining) for row in self.cells),
        )

    def limited_to(self, most: int) -> ComparedMetrics:
        """A copy with at most `most` columns, as far as `DROPPED_FIRST` allows."""
        too_many = len(self.kinds) + len(self.columns) - most
        present = [key for key in DROPPED_FIRST if key in {column.key for column in self.columns}]
        return self.without(present[: max(too_many, 0)])


def compare(
    runs: Sequence[Run],
    seeded: SeededMetrics | None = None,
    columns: Sequence[Column] = COLUMNS,
    only_if_nonzero: Collection[str] = ONLY_IF_NONZERO,
) -> ComparedMetrics:
    """Compare runs by the metrics with data, and mark the best value of each metric that differs.

    With `seeded`, values are means over seeds with the halves of their 95% intervals, and marks require significant
    differences.
    """
    flat = [flatten(run.summary, replicas=False) for run in runs]
    columns = tuple(column for column in columns if _has_data(column.key, flat, only_if_nonzero))
    if seeded is not None and seeded.varies:
        by_column = [_seeded_cells(column, seeded, len(runs)) for column in columns]
    else:
        by_column = [_cells(column, [numbers.get(column.key) for numbers in flat]) for column in columns]
    kinds = tuple(dict.fromkeys(kind for run in runs for kind in run.policies)) or ("run",)
    return ComparedMetrics(
        kinds=kinds,
        labels=tuple(tuple(run.policies.get(k, "") for k in kinds) if run.policies else (run.name,) for run in runs),
        columns=columns,
        cells=tuple(zip(*by_column, strict=True)) if by_column else tuple(() for _ in runs),
    )


def _has_data(key: str, flat: Sequence[dict[str, float | int | None]], only_if_nonzero: Collection[str]) -> bool:
    key = ONLY_WITH.get(key, key)
    values = [number for numbers in flat if (number := numbers.get(key)) is not None]
    return any(values) if key in only_if_nonzero else bool(values)


def _cells(column: Column, values: Sequence[float | int | None]) -> list[Cell]:
    texts = [or_dash(value, column.show) for value in values]
    known = [value for value in values if value is not None]
    if not column.better or not known or max(known) - min(known) <= SAME_WITHIN * max(map(abs, known)):
        return [Cell(text, False) for text in texts]
    best = min(known) if column.better == "low" else max(known)
    winner = column.show(best)
    return [Cell(text, text == winner) for text in texts]


def _seeded_cells(column: Column, seeded: SeededMetrics, num_runs: int) -> list[Cell]:
    estimates = [seeded.estimate(run, column.key) for run in range(num_runs)]
    means = [each.mean for each in estimates if each is not None]
    verdicts: Sequence[Verdict | None] = [None] * num_runs
    if column.better and means and max(means) - min(means) > SAME_WITHIN * max(map(abs, means)):
        verdicts = seeded.verdicts(column.key, column.better)
    return [
        Cell("-", False)
        if each is None
        else Cell(with_half(column, each), verdict == "best", verdict == "indistinguishable")
        for each, verdict in zip(estimates, verdicts, strict=True)
    ]


def with_half(column: Column, each: Estimate) -> str:
    """A mean and half of its interval in one unit, such as "412 ms ±13"."""
    if each.half <= 0:
        return column.show(each.mean)
    scale = 100.0 if column.show is percent else 1000.0 if column.show is seconds and abs(each.mean) < 0.9995 else 1.0
    return f"{column.show(each.mean)} ±{float(f'{each.half * scale:.2g}'):,g}"


_LABEL_SHARE = 5
"""A label gets at most this fraction of the width, a fifth, before columns are dropped for it."""
_LEAST_LABEL_CHARS = 8


def cut_labels(labels: Sequence[str], most: int) -> list[str]:
    """Labels of at most `most` characters where possible. Numbers keep different labels different."""
    texts = [text if len(text) <= most else f"{text[: most - 1]}…" for text in labels]
    full: dict[str, dict[str, None]] = {}
    for text, label in zip(texts, labels, strict=True):
        full.setdefault(text, {})[label] = None
    return [
        text if len(full[text]) == 1 else f"{text[: most - 3]}…#{list(full[text]).index(label) + 1}"
        for text, label in zip(texts, labels, strict=True)
    ]


def _label_sizes(width: int) -> Iterator[int]:
    most = max(width // _LABEL_SHARE, 2 * _LEAST_LABEL_CHARS)
    while most > _LEAST_LABEL_CHARS:
        yield most
        most = most * 2 // 3
    yield _LEAST_LABEL_CHARS


def _with_cut_labels(compared: ComparedMetrics, most: int, hides_shared: bool) -> ComparedMetrics:
    """The comparison with cut labels. `hides_shared`: drop the kinds of policies in which no runs differ, except the
    first kind."""
    columns = list(zip(compared.kinds, zip(*compared.labels, strict=True), strict=True))
    kept = [(kind, column) for kind, column in columns if not hides_shared or len(set(column)) > 1] or columns[:1]
    by_kind = [cut_labels(column, most) for _, column in kept]
    return replace(compared, kinds=tuple(kind for kind, _ in kept), labels=tuple(zip(*by_kind, strict=True)))


def comparison_table(runs: Sequence[Run], *, width: int, seeded: SeededMetrics | None = None) -> Table:
    """A table with one row per run for a console of `width` characters. Less important columns are dropped, and long
    labels are cut; notes give them in full."""
    return _table(runs, _fitting([compare(runs, seeded)], width)[0], seeded)


def _fitting(tables: Sequence[ComparedMetrics], width: int) -> Sequence[ComparedMetrics]:
    """The parts of a table, with labels cut and columns dropped until all parts fit into the width.

    Labels first shrink to their share, then columns are dropped, then labels shrink further. If that does not suffice,
    kinds of policies that all runs share are dropped, and at last all metrics except the first column's TTFT.
    """
    rest = [column.key for column in reversed(COLUMNS) if column.key not in (*DROPPED_FIRST, _LAST_KEPT)]
    columns = range(len(DROPPED_FIRST) + 1)
    shapes = [(most, num, False) for most in _label_sizes(width) for num in columns]
    shapes += [(_LEAST_LABEL_CHARS, num, True) for num in range(len(DROPPED_FIRST) + len(rest) + 1)]
    for most, num_dropped, hides_shared in shapes:
        dropped = (*DROPPED_FIRST, *rest)[:num_dropped]
        shown = [_with_cut_labels(each, most, hides_shared).without(dropped) for each in tables]
        if _width(shown) <= width:
            break
    return shown


_LAST_KEPT = "ttft_s.p99"
_GAP, _EDGES = 3, 2
"""Characters between two columns of a table, and around it."""


def _width(parts: Sequence[ComparedMetrics]) -> int:
    """Width of a table of these parts, one below the other, in characters. Every cell of a metric has one more
    character for its mark."""
    first = parts[0]
    labels = zip(first.kinds, *(row for each in parts for row in each.labels), strict=True)
    titles = [column.title for column in first.columns]
    cells = zip(titles, *([f"{cell.text} " for cell in row] for each in parts for row in each.cells), strict=True)
    widths = [max(map(len, column)) for column in (*labels, *cells)]
    return sum(widths) + _GAP * (len(widths) - 1) + _EDGES


def group_table(runs: Sequence[Run], by: str, *, width: int, seeded: SeededMetrics | None = None) -> Table | None:
    """A table with one row per run and tier or tenant, like `comparison_table`. `by` is "tier" or "tenant".

    None if the runs have different tiers or tenants, or if there are too many rows.
    """
    found = [list(run.summary.tiers if by == "tier" else run.summary.tenants) for run in runs]
    names = found[0]
    if not 0 < len(names) * len(runs) <= MOST_GROUP_ROWS or any(each != names for each in found):
        return None
    groups = [_of_group(runs, f"{by}.{name}", seeded) for name in names]
    shown = cut_labels(list(map(str, names)), max(width // _LABEL_SHARE, _LEAST_LABEL_CHARS))
    room = width - _GAP - max(map(len, (by, *shown)))
    return _by_group(by, shown, _fitting(_alike(groups), room))


def _alike(groups: Sequence[ComparedMetrics]) -> Sequence[ComparedMetrics]:
    """The comparisons, all with the same metrics: those that at least one tier or tenant has, in the order of the run's
    keys."""
    titles = {column.title for each in groups for column in each.columns}
    columns = tuple(column for column in COLUMNS if column.title in titles)

    def filled(each: ComparedMetrics) -> ComparedMetrics:
        at = {column.title: i for i, column in enumerate(each.columns)}
        cells = tuple(
            tuple(row[at[c.title]] if c.title in at else Cell("-", False) for c in columns) for row in each.cells
        )
        return replace(each, columns=columns, cells=cells)

    return [filled(each) for each in groups]


def _by_group(by: str, names: Sequence[str], groups: Sequence[ComparedMetrics]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (*groups[0].kinds, by):
        table.add_column(title, no_wrap=True)
    for column in groups[0].columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for i, label in enumerate(groups[0].labels):
        for name, each in zip(names, groups, strict=True):
            table.add_row(*map(escape, (*label, name)), *map(_marked, each.cells[i]))
    return table


def _of_group(runs: Sequence[Run], prefix: str, seeded: SeededMetrics | None) -> ComparedMetrics:
    """The comparison by the metrics of one tier or tenant."""
    chosen = [column for column in COLUMNS if column.key in GROUP_COLUMNS]
    keys = {f"{prefix}.{column.key}" for column in chosen if column.key in ONLY_IF_NONZERO}
    columns = [replace(column, key=f"{prefix}.{column.key}") for column in chosen]
    return compare(runs, seeded, columns, ONLY_IF_NONZERO | keys)


def error_notes(runs: Sequence[Run]) -> list[str]:
    """Bands of one run's latencies; for several runs, the largest deviation from the predictions."""
    shown = [
        (column, [run.bands[column.key] for run in runs if column.key in run.bands])
        for column in COLUMNS
        if column.key in SHOWN
    ]
    shown = [(column, bands) for column, bands in shown if bands]
    if not shown:
        return []
    parts = ", ".join(
        f"{column.title} {column.show(bands[0].low)} to {column.show(bands[0].high)}"
        if len(runs) == 1
        else f"{column.title} within {max(map(percent_of, bands)):.0f}%"
        for column, bands in shown
    )
    source = _source_of_errors(dict.fromkeys(band.basis for _, bands in shown for band in bands))
    return [f"With the error of the step times, 9 of 10 likely: {parts}. {source}"]


_STEP_TIMES = {
    "GPU and version": "step times of the same GPU and engine version",
    "GPU": "step times of the same GPU and another engine version",
    "neither": "step times of another GPU and engine version",
}
"""The measurements behind a prediction's step times, by `ErrorClass.known`."""


def _source_of_errors(classes: Iterable[ErrorClass]) -> str:
    """A sentence: which measured runs the errors come from."""
    kinds: dict[str, dict[str, None]] = {}
    for each in classes:
        weights = each.weights if each.weights == "experts" else f"{each.weights} weights"
        of, at = f"of models with {weights}" if each.weights else "", f"at {each.load} load" if each.load else ""
        kind = " ".join(filter(None, [of, at]))
        kinds.setdefault(_STEP_TIMES[each.known], {})[kind] = None
    runs = []
    for known, found in kinds.items():
        narrow = ", or ".join(filter(None, found))
        where = f", {narrow}" if narrow else ""
        runs.append(known + where + (" where enough were measured" if narrow and "" in found else ""))
    return f"The errors are those of measured runs with {'; and with '.join(runs)}."


def energy_notes(runs: Sequence[Run]) -> list[str]:
    """The energy of runs, and its possible error."""
    found = [(run.summary.energy_kwh, run.bands["energy_kwh"]) for run in runs if "energy_kwh" in run.bands]
    if not found:
        return []
    kwh = [value for value, _ in found if value is not None]
    low, high = (short_number(value) for value in (min(kwh), max(kwh)))
    each = f"{low} kWh" if low == high else f"{low} to {high} kWh"
    is_measured = all(band.basis.known == "GPU" for _, band in found)
    by = "" if is_measured else ", not measured on this type of GPU"
    within = max((band.high / value - 1 for value, band in found if value), default=0.0)
    return [f"GPU energy: {each}, 9 of 10 likely within {100 * within:.0f}%{by}."]


def percent_of(band: Band) -> float:
    """Half the width of a band around its prediction, which is the geometric mean of its ends."""
    return 100 * ((band.high / band.low) ** 0.5 - 1) if band.low > 0 else 0.0


def seeds_note(seeded: SeededMetrics) -> str:
    """How the numbers over several seeds were computed."""
    num = len(seeded.seeds)
    if not seeded.varies:
        return f"Nothing here is random: {num} seeds give the same numbers, which hold for these requests alone."
    return f"Means over {num} seeds, ± half of the 95% interval."


def _table(runs: Sequence[Run], compared: ComparedMetrics, seeded: SeededMetrics | None) -> Table:
    notes = list(dict.fromkeys(note for run in runs for note in run.notes))
    if any(column.key == "slo_attainment" for column in compared.columns):
        notes += dict.fromkeys(f"SLO met: {text}." for run in runs if (text := _slos(run)))
    for i, kind in enumerate(compared.kinds):
        cut = {row[i]: run.policies.get(kind, run.name) for row, run in zip(compared.labels, runs, strict=True)}
        notes += [f"{text}: {label}" for text, label in cut.items() if "…" in text]
    hidden = {kind: text for run in runs for kind, text in run.policies.items() if kind not in compared.kinds}
    notes += [f"{kind}: {text}" for kind, text in hidden.items()]
    notes += versions_notes((pool.engine, pool.version) for run in runs for pool in run.pools)
    if (uncalibrated := uncalibrated_note(runs)) is not None:
        notes.append(uncalibrated)
    notes += error_notes(runs) + energy_notes(runs)
    if seeded is not None:
        notes.append(seeds_note(seeded))
    marked = [cell for row in compared.cells for cell in row]
    if any(cell.best for cell in marked):
        notes.append(f"{BEST} best of its column.")
    if any(cell.same for cell in marked):
        notes.append(f"{SAME} indistinguishable from the best of its column, by the differences seed by seed.")
    caption = "\n".join(notes) or None
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    for kind in compared.kinds:
        table.add_column(kind, no_wrap=True)
    for column in compared.columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    for label, cells in zip(compared.labels, compared.cells, strict=True):
        table.add_row(*map(escape, label), *map(_marked, cells))
    return table


def _slos(run: Run) -> str:
    """The SLOs of the attainment, such as "TTFT 1 to 5 s, TPOT 50 ms"; "" without SLOs."""
    ranges = slo_ranges(sample(run.records, run.summary.warmup_s, run.slo))
    texts = []
    for kind, (low, high) in ranges.items():
        low, high = round(low, 6), round(high, 6)
        both = seconds(low) if low == high else f"{seconds(low)} to {seconds(high)}"
        texts.append(f"{kind.upper()} {both}")
    return ", ".join(texts)


def _marked(cell: Cell) -> str:
    if cell.best:
        return f"[bold green]{cell.text}{BEST}[/]"
    return f"[green]{cell.text}{SAME}[/]" if cell.same else f"{cell.text} "


def render(runs: Sequence[Run], *, width: int, color: bool = False, seeded: SeededMetrics | None = None) -> str:
    """Render the table as text for a console of `width` characters."""
    groups = [group_table(runs, by, width=width, seeded=seeded) for by in ("tier", "tenant")]
    return printed([comparison_table(runs, width=width, seeded=seeded), *filter(None, groups)], width, color)
