"""Charts over seeds: means, with 95% intervals if there is more than one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from headway.metrics.interval import interval
from headway.metrics.series import cdf
from headway.report.charts import Figure, layout, line_style, numbers
from headway.report.page import COLORS

Seeds = Sequence[float | None]
"""One value for each seed; None if a seed has no value."""


def curves(lines: Mapping[str, Sequence[tuple[float, Seeds]]], x: str, y: str, **extra_layout: Any) -> Figure:
    """Named lines through points (x, values by seed). `more` extends the layout, such as xaxis={"type": "log"}."""
    traces = []
    for i, (name, points) in enumerate(lines.items()):
        values = [seeds for _, seeds in points]
        trace = {"type": "scatter", "mode": "lines+markers", "line": line_style(i), "marker": {"size": 6}}
        traces.append(trace | {"x": [at for at, _ in points]} | _over_seeds(name, values))
    return {"data": traces, "layout": _layout(x, y, extra_layout)}


def bars(groups: Sequence[str], series: Mapping[str, Sequence[Seeds]], y: str, **extra_layout: Any) -> Figure:
    """Groups of named bars: for each series, the values by seed of every group."""
    traces = []
    for i, (name, values) in enumerate(series.items()):
        trace = {"type": "bar", "x": list(groups), "marker": {"color": COLORS[i % len(COLORS)]}}
        traces.append(trace | _over_seeds(name, values))
    return {"data": traces, "layout": _layout("", y, {"barmode": "group", "bargap": 0.3, **extra_layout})}


def distributions(samples: Mapping[str, Sequence[float]], x: str, **extra_layout: Any) -> Figure:
    """Cumulative distributions of named samples."""
    traces = []
    for i, (name, values) in enumerate(samples.items()):
        curve_points = cdf(np.asarray(values, dtype=np.float64))
        if curve_points is not None:
            hover = f"%{{y:.1f}}% within %{{x:.4g}}<extra>{name}</extra>"
            curve = {"x": numbers(curve_points.value_s), "y": numbers(curve_points.percent, 6), "line": line_style(i)}
            traces.append({"type": "scatter", "mode": "lines", "name": name, "hovertemplate": hover} | curve)
    percent = {"range": [0, 101], "ticksuffix": "%"}
    return {"data": traces, "layout": _layout(x, "% of values", {"yaxis": percent, **extra_layout})}


def _over_seeds(name: str, values: Sequence[Seeds]) -> dict[str, Any]:
    """Means, error bars and hover texts."""
    numbers_by_point = [[float(value) for value in seeds if value is not None] for seeds in values]
    means = [fmean(seeds) if seeds else None for seeds in numbers_by_point]
    halves = [(ends[1] - ends[0]) / 2 if (ends := interval(seeds)) else 0.0 for seeds in numbers_by_point]
    error = {"type": "data", "array": halves, "thickness": 1.2, "width": 3, "visible": any(halves)}
    hover = f"%{{x}}: %{{y:.4g}} ± %{{error_y.array:.2g}}<extra>{name}</extra>"
    if not any(halves):
        hover = f"%{{x}}: %{{y:.4g}}<extra>{name}</extra>"
    return {"name": name, "y": means, "error_y": error, "hovertemplate": hover}


def _layout(x: str, y: str, extra_layout: Mapping[str, Any]) -> Any:
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}}
    margin = {"l": 52, "r": 10, "t": 34, "b": 44}
    return layout(x, y, **{"height": 330, "showlegend": True, "legend": legend, "margin": margin, **extra_layout})
