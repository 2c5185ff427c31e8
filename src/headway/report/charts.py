"""The charts of the HTML report, as Plotly figures in plain JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.metrics.latency import sample
from headway.metrics.series import ReplicaTimelines, bin_middles_s, cdf, fleet_load, itl_gaps, replica_timelines
from headway.report.model_error import SHOWN
from headway.report.page import COLORS, INK, QUIET, RULE
from headway.report.run import Run

Figure = dict[str, Any]
"""A dict with `data` and `layout`. The `meta` of a trace is the index of its run."""

LOAD_BINS = 400
MAX_CELLS = 240_000
"""Cells of all heatmaps together; bounds the size of the page."""

TIME_UNITS = ((2 * 86400.0, 86400.0, "days"), (3 * 3600.0, 3600.0, "h"), (600.0, 60.0, "min"))
"""(from, divisor, name)."""


def time_unit(end_s: float) -> tuple[float, str]:
    """(seconds per unit, unit) for a time axis that ends at `end_s`."""
    return next(((size, name) for least, size, name in TIME_UNITS if end_s >= least), (1.0, "s"))


def numbers(values: npt.NDArray[Any], digits: int = 5) -> list[Any]:
    """Values rounded to significant digits; None for NaN."""
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [None if value != value else int(value) if value == int(value) else value for value in rounded]


def line_style(run: int) -> dict[str, Any]:
    """A run's colour, the same in every chart."""
    dash = ("solid", "dash", "dot")[run // len(COLORS) % 3]
    return {"color": COLORS[run % len(COLORS)], "width": 1.8, "dash": dash}


def layout(x: str, y: str, height: int = 300, **more: Any) -> dict[str, Any]:
    """A chart's layout with these axis titles. `more` overrides it; `xaxis` and `yaxis` are merged key by key."""
    axis = {
        "gridcolor": RULE,
        "zeroline": False,
        "linecolor": "#c9ced4",
        "showline": True,
        "ticks": "outside",
        "tickcolor": "#c9ced4",
        "ticklen": 4,
        "automargin": True,
    }
    base = {
        "height": height,
        "margin": {"l": 52, "r": 10, "t": 8, "b": 44},
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "showlegend": False,
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#fff", "bordercolor": "#c9ced4", "font": {"size": 12, "color": INK}},
        "xaxis": axis | {"title": {"text": x, "font": {"color": QUIET}, "standoff": 8}},
        "yaxis": axis | {"title": {"text": y, "font": {"color": QUIET}, "standoff": 8}, "rangemode": "tozero"},
    }
    for name in ("xaxis", "yaxis"):
        base[name] |= more.pop(name, {})
    return base | more


def limit(axis: str, at: float, color: str = QUIET, dash: str = "dot") -> dict[str, Any]:
    """A line across a chart, for the `shapes` of its layout, at a value of this axis: "x" or "y"."""
    other = "x" if axis == "y" else "y"
    ends = {f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1, f"{axis}0": at, f"{axis}1": at}
    return {"type": "line", **ends, "line": {"color": color, "width": 1, "dash": dash}}


def points(
    name: str,
    at: Iterable[tuple[Any, Any, str]],
    marker: Mapping[str, Any],
    hover: str = "%{text}<extra></extra>",
    mode: str = "markers",
    **more: Any,
) -> dict[str, Any]:
    """A trace of points, each with x, y and a text. `hover`: the description of a point; `%{text}` is its text."""
    listed = list(at)
    xs, ys, texts = ([each[i] for each in listed] for i in range(3))
    named = {"type": "scatter", "mode": mode, "name": name, "x": xs, "y": ys, "text": texts}
    return named | {"hovertemplate": hover, "marker": marker} | more


def star(name: str, x: Any, y: Any, text: str) -> dict[str, Any]:
    """The point that is chosen."""
    marker = {"symbol": "star", "size": 19, "color": "#f0b14a", "line": {"width": 1.4, "color": INK}}
    return points(name, [(x, y, text)], marker, f"%{{text}}<extra>{name}</extra>")


def _trace(run: int, name: str, x: list[Any], y: list[Any], hover: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "meta": run,
        "x": x,
        "y": y,
        "line": line_style(run),
        "hovertemplate": f"{hover}<extra>{name}</extra>",
    } | more


def distributions(runs: Sequence[Run]) -> dict[str, Figure]:
    """Cumulative distributions of TTFT, ITL and E2E. A chart without data is omitted."""
    traces: dict[str, list[dict[str, Any]]] = {"ttft": [], "itl": [], "e2e": []}
    for index, run in enumerate(runs):
        warmup_s = run.summary.warmup_s
        chosen = sample(run.records, warmup_s, None)
        values: dict[str, Any] = {"ttft": chosen.ttft_s, "itl": itl_gaps(run.records, warmup_s), "e2e": chosen.e2e_s}
        for name, curve in ((name, cdf(column)) for name, column in values.items()):
            if curve is not None:
                x = numbers(curve.value_s * (1000.0 if name == "itl" else 1.0))
                hover = f"%{{y:.2f}}% within %{{x:.4g}} {'ms' if name == 'itl' else 's'}"
                traces[name].append(_trace(index, run.name, x, numbers(curve.percent, 6), hover))
    titles = {"ttft": "TTFT (s)", "itl": "inter-token latency (ms)", "e2e": "end-to-end latency (s)"}
    return {
        name: {"data": lines, "layout": layout(titles[name], "% of values", **_log_axes(lines))}
        for name, lines in traces.items()
        if lines
    }


def _log_axes(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A logarithmic x axis, unless the values have similar sizes or some are 0."""
    low = min(line["x"][0] for line in lines)
    high = max(line["x"][-1] for line in lines)
    percent = {"range": [0, 101], "ticksuffix": "%"}
    if low > 0 and high / low > 20:
        return {"xaxis": {"type": "log", "tickvals": _ticks(low, high)}, "yaxis": percent}
    return {"xaxis": {"rangemode": "tozero"}, "yaxis": percent}


def _ticks(low: float, high: float) -> list[float]:
    """Ticks at 1, 2 and 5 of each decade, or fewer if there are many decades."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    leading = (1, 2, 5) if len(decades) <= 3 else (1, 3) if len(decades) <= 5 else (1,)
    return [float(f"{digit}e{decade}") for decade in decades for digit in leading]


def model_error(runs: Sequence[Run]) -> dict[str, Figure]:
    """Each run's latencies, with the error of the step times as bars; empty without bands."""
    data: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        found = [(key, band) for key in SHOWN if (band := run.bands.get(key)) is not None]
        if not found:
            continue
        predicted_s = np.array([(band.low * band.high) ** 0.5 for _, band in found])
        names = [f"{key.split('_s.')[0].upper()} {key.rpartition('.')[2]}" for key, _ in found]
        ends = [f"{1000 * band.low:,.4g} to {1000 * band.high:,.4g} ms" for _, band in found]
        data.append({
            "type": "scatter", "mode": "markers", "name": run.name, "meta": index, "x": numbers(predicted_s),
            "y": names, "marker": {"color": COLORS[index % len(COLORS)], "size": 9}, "customdata": ends,
            "error_x": {
                "type": "data", "symmetric": False, "thickness": 1.8, "width": 4,
                "array": numbers(np.array([band.high for _, band in found]) - predicted_s),
                "arrayminus": numbers(predicted_s - np.array([band.low for _, band in found])),
            },
            "hovertemplate": f"%{{x:.4g}} s, %{{customdata}}<extra>{run.name}</extra>",
        })  # fmt: skip
    if not data:
        return {}
    rows = {"type": "category", "autorange": "reversed", "title": {"text": ""}}
    shape = layout("s", "", 90 + 34 * len(SHOWN), xaxis={"type": "log"}, yaxis=rows)
    return {"model-error": {"data": data, "layout": shape}}


def over_time(runs: Sequence[Run]) -> dict[str, Figure]:
    """Waiting and running requests, KV use, and arrivals against completions over time."""
    unit_s, unit = time_unit(max(run.records.end_s for run in runs))
    lines: dict[str, list[dict[str, Any]]] = {"waiting": [], "running": [], "kv": [], "progress": []}
    for index, run in enumerate(runs):
        load = fleet_load(run.records, bins=LOAD_BINS)
        x, edges = numbers(bin_middles_s(load.edges_s) / unit_s), numbers(load.edges_s / unit_s)
        at = f"%{{y:,.4~g}} at %{{x:.4g}} {unit}"
        lines["waiting"].append(_trace(index, run.name, x, numbers(load.waiting, 3), f"waiting: {at}"))
        lines["running"].append(_trace(index, run.name, x, numbers(load.running, 3), f"running: {at}"))
        arrived = _trace(index, run.name, edges, load.arrived.tolist(), f"arrived: {at}")
        arrived["line"] = {"color": "#aab2ba", "width": 1.4, "dash": "dot"}
        lines["progress"] += [arrived, _trace(index, run.name, edges, load.completed.tolist(), f"completed: {at}")]
        busy = replica_timelines(run.records, bins=LOAD_BINS)
        share = 100 * _fleet_kv_use(run, busy)
        hover = f"KV: %{{y:.1f}}% at %{{x:.4g}} {unit}"
        lines["kv"].append(
            _trace(index, run.name, numbers(bin_middles_s(busy.edges_s) / unit_s), numbers(share, 4), hover)
        )
    time_axis = f"time ({unit})"
    return {
        "waiting": _over(lines["waiting"], time_axis, "requests waiting"),
        "running": _over(lines["running"], time_axis, "requests running"),
        "kv": _over(lines["kv"], time_axis, "KV in use", ticksuffix="%"),
        "progress": _over(lines["progress"], time_axis, "requests so far"),
    }


def _over(lines: list[dict[str, Any]], x: str, y: str, ticksuffix: str = "") -> Figure:
    return {
        "data": lines,
        "layout": layout(x, y, 260, yaxis={"tickformat": ",~g", "ticksuffix": ticksuffix}),
    }


def _fleet_kv_use(run: Run, found: ReplicaTimelines) -> npt.NDArray[np.float64]:
    """Mean KV use of the replicas that are up, weighted by capacity."""
    capacity = np.array([[float(replica.kv_capacity_tokens)] for replica in run.records.replicas])
    weight = np.where(np.isnan(found.kv_use), 0.0, capacity)
    total = weight.sum(axis=0)
    used = np.nansum(found.kv_use * capacity, axis=0)
    return np.asarray(np.divide(used, total, out=np.full(len(total), np.nan), where=total > 0))


SCALE = [[0, "#f3f5f8"], [0.25, "#c6d8ec"], [0.5, "#86b0d8"], [0.75, "#3f78b5"], [1, "#163a66"]]

QUANTITIES = {
    "kv": ("KV use", "% of KV in use"),
    "batch": ("Decoding requests", "decoding requests"),
    "waiting": ("Waiting requests", "waiting requests"),
}
"""Quantities of the heatmaps, with name and title of the colour bar."""


def replica_heatmaps(runs: Sequence[Run]) -> list[dict[str, Figure]]:
    """Heatmaps of replicas over time, by run and quantity. White means down or absent."""
    num_rows = sum(len(run.records.replicas) for run in runs)
    bins = int(np.clip(MAX_CELLS // max(num_rows * len(QUANTITIES), 1), 24, 300))
    found = [replica_timelines(run.records, bins=bins) for run in runs]
    tables = {
        "kv": [100 * each.kv_use for each in found],
        "batch": [each.batch_size for each in found],
        "waiting": [each.num_waiting for each in found],
    }
    # one scale for all runs, so that switching between them shows differences
    tops = {name: max((float(np.nanmax(t, initial=0.0)) for t in each), default=0) for name, each in tables.items()}
    return [
        {name: _heatmap(run, found[i], tables[name][i], name, max(tops[name], 1e-3)) for name in QUANTITIES}
        for i, run in enumerate(runs)
    ]


def _heatmap(run: Run, found: ReplicaTimelines, table: npt.NDArray[np.float64], name: str, top: float) -> Figure:
    replicas = run.records.replicas
    pools = {replica.pool for replica in replicas}
    labels = [f"{r.id}" if len(pools) == 1 else f"{r.pool} {r.id}" for r in replicas]
    unit_s, unit = time_unit(run.records.end_s)
    title = {"text": QUANTITIES[name][1], "side": "right"}
    digits = 3 if name == "kv" else 2
    trace = {
        "type": "heatmap",
        "x": numbers(bin_middles_s(found.edges_s) / unit_s),
        "y": labels,
        "z": [numbers(row, digits) for row in table],
        "zmin": 0,
        "zmax": top,
        "hoverongaps": False,
        "colorscale": SCALE,
        "colorbar": {"title": title, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": f"replica %{{y}}: %{{z}} at %{{x:.4g}} {unit}<extra></extra>",
    }
    height = int(np.clip(90 + 20 * len(replicas), 190, 640))
    axis = {"type": "category", "autorange": "reversed", "showgrid": False, "rangemode": "normal"}
    axes = layout(f"time ({unit})", "replica", height, xaxis={"showgrid": False}, yaxis=axis)
    return {"data": [trace], "layout": axes}


def tiers(runs: Sequence[Run]) -> dict[str, Figure]:
    """TTFT and E2E p99 by tier; empty if there is only one tier."""
    names = sorted({name for run in runs for name in run.summary.tiers}, key=int)
    if not names:
        return {}
    figures = {}
    for field, title in (("ttft_s", "TTFT p99 (s)"), ("e2e_s", "end-to-end latency p99 (s)")):
        bars = []
        for index, run in enumerate(runs):
            parts = [run.summary.tiers.get(name) for name in names]
            found = [getattr(part, field) if part else None for part in parts]
            bars.append(
                {
                    "type": "bar",
                    "name": run.name,
                    "meta": index,
                    "x": [f"tier {name}" for name in names],
                    "y": [None if f is None else float(f"{f.p99:.4g}") for f in found],
                    "marker": {"color": COLORS[index % len(COLORS)]},
                    "hovertemplate": f"%{{x}}: %{{y:.4g}} s<extra>{run.name}</extra>",
                }
            )
        figures[f"tier-{field}"] = {"data": bars, "layout": layout("", title, 260, bargap=0.3)}
    return figures


def pools(runs: Sequence[Run]) -> dict[str, Figure]:
    """TTFT and E2E p99 by pool if there are several pools, and the share of requests by replica."""
    figures: dict[str, Figure] = {}
    names = list(dict.fromkeys(replica.pool for run in runs for replica in run.records.replicas))
    if len(names) > 1:
        for field, title in (("ttft_s", "TTFT p99 (s)"), ("e2e_s", "end-to-end latency p99 (s)")):
            heights = [_p99_by_pool(run, field, names) for run in runs]
            figures[f"pool-{field}"] = _bars(runs, names, heights, title, "%{x}: %{y:.4g} s")
    replicas = list(dict.fromkeys(_replica_label(run, i) for run in runs for i in range(len(run.records.replicas))))
    if 1 < len(replicas) <= _MOST_BARS:
        heights = [_shares(run, replicas) for run in runs]
        figures["share"] = _bars(runs, replicas, heights, "% of requests", "replica %{x}: %{y:.1f}%")
    return figures


_MOST_BARS = 200
"""Maximum number of replicas with a bar each; more bars would be indistinguishable."""


def _replica_label(run: Run, index: int) -> str:
    """A replica's label: its number, after its pool's name if there are several pools."""
    replica = run.records.replicas[index]
    several = len({each.pool for each in run.records.replicas}) > 1
    return f"{replica.pool} {replica.id}" if several else str(replica.id)


def _p99_by_pool(run: Run, field: str, names: Sequence[str]) -> list[float | None]:
    chosen = sample(run.records, run.summary.warmup_s, None)
    values = np.asarray(getattr(chosen, field))
    pools = np.array([names.index(each.pool) for each in run.records.replicas] + [-1])
    of_request = pools[np.asarray(run.records.requests["replica"], "i8")[chosen.rows]]
    found: list[float | None] = []
    for i in range(len(names)):
        known = values[(of_request == i) & ~np.isnan(values)]
        found.append(float(f"{np.quantile(known, 0.99):.4g}") if len(known) else None)
    return found


def _shares(run: Run, labels: Sequence[str]) -> list[float | None]:
    placed = np.asarray(run.records.requests["replica"], "i8")
    counts = np.bincount(placed[placed >= 0], minlength=len(run.records.replicas))
    share = {_replica_label(run, i): 100.0 * num / max(int(counts.sum()), 1) for i, num in enumerate(counts.tolist())}
    return [None if label not in share else float(f"{share[label]:.3g}") for label in labels]


def _bars(
    runs: Sequence[Run], x: Sequence[str], heights: Sequence[Sequence[float | None]], title: str, hover: str
) -> Figure:
    data = [
        {
            "type": "bar",
            "name": run.name,
            "meta": index,
            "x": list(x),
            "y": list(heights[index]),
            "marker": {"color": COLORS[index % len(COLORS)]},
            "hovertemplate": f"{hover}<extra>{run.name}</extra>",
        }
        for index, run in enumerate(runs)
    ]
    return {"data": data, "layout": layout("", title, 260, bargap=0.3, xaxis={"type": "category"})}
