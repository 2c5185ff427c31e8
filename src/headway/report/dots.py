"""Means and intervals over seeds as figures: dots for sets of policies, or lines over a swept value; and the
verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.metrics.seeds import Estimate, SeededMetrics
from headway.report.charts import Figure, layout, line_style
from headway.report.page import COLORS
from headway.report.table import COLUMNS, Column, with_half

KEYS = ("ttft_s.p99", "usd_per_million_output_tokens")
_TITLES = {column.key: column for column in COLUMNS}
_ROW_PIXELS, _REST_PIXELS = 26, 96


def column_of(key: str) -> Column:
    """The display format of a metric. Metrics without a table column use their key."""
    return _TITLES.get(key, Column(key, key, "", lambda value: f"{value:.4g}"))


def value(seeded: SeededMetrics, run: int, key: str) -> Estimate | float | None:
    """A metric's mean and interval, or its value with one seed."""
    estimate = seeded.estimate(run, key)
    if estimate is not None:
        return estimate
    known = [each for each in seeded.values(run, key) if each is not None]
    return float(known[0]) if known else None


def shown(seeded: SeededMetrics, run: int, key: str) -> str:
    """A value such as "412 ms ±13"; a dash for none."""
    each = value(seeded, run, key)
    if each is None:
        return "-"
    return with_half(column_of(key), each) if isinstance(each, Estimate) else column_of(key).show(each)


def figure(names: Sequence[str], seeded: SeededMetrics, keys: Sequence[str] = KEYS) -> Figure:
    """A panel for each metric with a row for each set of policies: the mean as a dot, its interval as a bar."""
    keys = [key for key in keys if any(value(seeded, run, key) is not None for run in range(len(names)))] or keys[:1]
    data: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for i, key in enumerate(keys):
        suffix = "" if i == 0 else str(i + 1)
        for run, name in enumerate(names):
            each = value(seeded, run, key)
            if each is not None:
                data.append(_dot(run, name, key, each, suffix))
        low, high = i / len(keys), (i + 1) / len(keys)
        gap = 0.06 if len(keys) > 1 else 0.0
        axes[f"xaxis{suffix}"] = {
            "domain": [low + gap * (i > 0), high],
            "title": {"text": _title(key)},
            "rangemode": "tozero",
            "anchor": f"y{suffix}",
        }
        if _spans_decades(seeded, len(names), key):
            axes[f"xaxis{suffix}"] |= {"type": "log", "rangemode": "normal"}
        axes[f"yaxis{suffix}"] = {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": list(reversed(names)),
            "automargin": True,
            "showticklabels": i == 0,
            "anchor": f"x{suffix}",
            "showgrid": True,
            "title": {"text": ""},
            "range": [-0.6, len(names) - 0.4],
        }
    base = layout("", "", _REST_PIXELS + _ROW_PIXELS * len(names))
    common = {name: {**base["xaxis" if name[0] == "x" else "yaxis"], **axis} for name, axis in axes.items()}
    return {"data": data, "layout": {**base, **common, "margin": {"l": 10, "r": 16, "t": 8, "b": 44}}}


def _spans_decades(seeded: SeededMetrics, num_runs: int, key: str) -> bool:
    """Whether the values differ so much that a linear axis would show only the largest."""
    found = [value(seeded, run, key) for run in range(num_runs)]
    means = [each.mean if isinstance(each, Estimate) else each for each in found if each is not None]
    return min(means, default=0.0) > 0 and max(means) > 20 * min(means)


def _title(key: str) -> str:
    column = column_of(key)
    return f"{column.title} (s)" if "_s." in key or key.endswith("_s") else column.title


def _dot(run: int, name: str, key: str, each: Estimate | float, axis: str) -> dict[str, Any]:
    mean = each.mean if isinstance(each, Estimate) else each
    text = with_half(column_of(key), each) if isinstance(each, Estimate) else column_of(key).show(each)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "meta": run,
        "x": [mean],
        "y": [name],
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "marker": {"color": COLORS[run % len(COLORS)], "size": 10},
        "hovertemplate": f"{name}: {text}<extra></extra>",
    }
    if isinstance(each, Estimate):
        trace["error_x"] = {"type": "data", "array": [each.half], "thickness": 1.8, "width": 4}
    return trace


def lines(points: Mapping[str, Sequence[tuple[Any, Estimate | float | None]]], x: str, key: str) -> Figure:
    """A line for each name through its points, with a band of the intervals."""
    data: list[dict[str, Any]] = []
    for run, (name, pairs) in enumerate(points.items()):
        known = [(at, each) for at, each in pairs if each is not None]
        xs = [at for at, _ in known]
        color = COLORS[run % len(COLORS)]
        if any(isinstance(each, Estimate) for _, each in known):
            bounds = [(each.low, each.high) if isinstance(each, Estimate) else (each, each) for _, each in known]
            data.append({
                "type": "scatter", "mode": "lines", "x": [*xs, *reversed(xs)], "fill": "toself", "fillcolor": color,
                "y": [*(high for _, high in bounds), *(low for low, _ in reversed(bounds))], "opacity": 0.18,
                "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "legendgroup": name,
            })  # fmt: skip
        means = [each.mean if isinstance(each, Estimate) else each for _, each in known]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": xs,
                "y": means,
                "line": line_style(run),
                "legendgroup": name,
                "marker": {"color": color, "size": 6},
            }
        )
    title = _title(key)
    if any(isinstance(each, Estimate) for pairs in points.values() for _, each in pairs):
        title += ", mean and 95% interval"
    shape = layout(_label(x), title, 400, **(legend(len(points)) if len(points) > 1 else {}))
    return {"data": data, "layout": shape}


def legend(num_lines: int) -> dict[str, Any]:
    """The layout parts that name the lines above the chart."""
    return {
        "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "margin": {"l": 52, "r": 10, "t": 20 + 22 * ((num_lines + 1) // 2), "b": 44},
    }


def _label(key: str) -> str:
    """A scenario key as an axis title."""
    name = key.rpartition(".")[2]
    return "arrivals (requests/s)" if name == "arrivals" else name


def verdict(names: Sequence[str], seeded: SeededMetrics, key: str) -> str:
    """One sentence: which set of policies has the best mean of a metric, and which sets the seeds do not separate from
    it."""
    column = column_of(key)
    values = {run: each for run in range(len(names)) if (each := value(seeded, run, key)) is not None}
    if not values:
        return f"No run has a {column.title}."
    means = {run: each.mean if isinstance(each, Estimate) else each for run, each in values.items()}
    order = sorted(means, key=lambda run: means[run] if column.better != "high" else -means[run])
    best, word = order[0], "highest" if column.better == "high" else "lowest"
    sentence = f"{names[best]} has the {word} {column.title}, {shown(seeded, best, key)}"
    if len(order) == 1:
        return sentence + "."
    verdicts = seeded.verdicts(key, column.better or "low")
    if not any(verdicts):
        return f"{sentence}, with one seed; {names[order[-1]]} has {shown(seeded, order[-1], key)}."
    tied = [names[run] for run in order[1:] if verdicts[run] == "indistinguishable"]
    listed = " and ".join(filter(None, [", ".join(tied[:-1]), *tied[-1:]]))
    ending = f"; {listed} {'is' if len(tied) == 1 else 'are'} indistinguishable from it" if tied else ""
    worst = order[-1]
    if verdicts[worst] == "worse":
        ending += f"; {names[worst]} has {shown(seeded, worst, key)}"
    intervals = f" ({len(seeded.seeds)} seeds, 95% intervals)" if seeded.varies else ""
    return f"{sentence}{ending}{intervals}."
