"""A sweep as an HTML page: latency over throughput, measured and predicted, with the knee."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.metrics.latency import Distribution
from headway.report.blocks import Chart, Charts, Facts, Lines, Report, Section, Table
from headway.report.charts import layout
from headway.report.page import COLORS
from headway.report.table import seconds
from headway.serving.load_generator.sweep import Point, Sweep

HEADS = ("load", "queue", "requests/s", "tokens/s", "TTFT", "TTFT p99", "TPOT", "ITL p99", "E2E", "in time")
PREDICTED = ("TTFT, predicted", "E2E, predicted")
Predicted = dict[str, float]
"""Predicted seconds by `ttft_mean` and `e2e_mean`."""


def rows(found: Sweep, predicted: Sequence[Predicted | None]) -> list[list[str]]:
    """A row for each load with the columns of `HEADS`, and of `PREDICTED` if there are predictions."""
    return [
        _row(point, each, any(predicted), point is found.knee)
        for point, each in zip(found.points, predicted, strict=True)
    ]


def heads(predicted: Sequence[Predicted | None]) -> list[str]:
    return [*HEADS, *(PREDICTED if any(predicted) else ())]


def _row(point: Point, predicted: Predicted | None, with_predicted: bool, is_knee: bool) -> list[str]:
    values = point.load.measured
    share = values.slo_attainment
    row = [
        point.name + (", knee" if is_knee else ""),
        "grows" if point.is_growing else "",
        f"{values.throughput_rps:.3g}",
        f"{values.output_tokens_per_s:,.0f}",
        _text(values.ttft_s, "mean"),
        _text(values.ttft_s, "p99"),
        _text(values.tpot_s, "mean"),
        _text(values.itl_s, "p99"),
        _text(values.e2e_s, "mean"),
        "-" if share is None else f"{share:.1%}",
    ]
    if with_predicted:
        row += ["-" if predicted is None else seconds(predicted[key]) for key in ("ttft_mean", "e2e_mean")]
    return row


def _text(found: Distribution | None, name: str) -> str:
    return "-" if found is None else seconds(getattr(found, name))


def headline(found: Sweep, slo: str, attainment: float) -> str:
    """The knee, the saturation, and the highest rate within the SLOs."""
    knee = found.knee
    parts = (
        [] if knee is None else [f"knee at {knee.rate_rps:.3g} requests/s sent ({knee.throughput_rps:.3g} answered)"]
    )
    parts.append(f"at most {found.most_rps:.3g} requests/s answered")
    if (highest := found.highest) is not None:
        if not highest.rate_rps:
            parts.append(f"no rate has {attainment:.0%} within {slo}")
        else:
            limit = "the fastest of the sweep" if highest.missed_rps is None else f"{highest.missed_rps:.3g} misses"
            parts.append(f"{attainment:.0%} within {slo} up to {highest.rate_rps:.3g} requests/s ({limit})")
    return "; ".join(parts)


def report(
    found: Sweep, predicted: Sequence[Predicted | None], about: dict[str, str], title: str, notes: Sequence[str]
) -> Report:
    """`predicted` has an entry for each point; `title` is the headline."""
    bars = " Bars: the prediction's mean error at the other loads." if any(predicted) else ""
    caption = f"A point is one load; means over requests. Star: the knee.{bars}"
    charts = [
        Chart("e2e", "Whole answers (E2E)", _picture(found, predicted, "e2e"), caption),
        Chart("ttft", "First tokens (TTFT)", _picture(found, predicted, "ttft"), caption),
    ]
    loads = Table(heads(predicted), rows(found, predicted), words=(0, 1))
    sections = [Section("Latency against throughput", [Charts(charts)]), Section("Loads", [loads])]
    return Report("load", f"{title[:1].upper()}{title[1:]}", [Facts(about), Lines(notes, "note")], sections)


def _picture(found: Sweep, predicted: Sequence[Predicted | None], kind: str) -> dict[str, Any]:
    chosen = [(point, each) for point, each in zip(found.points, predicted, strict=True) if _mean(point, kind)]
    chosen.sort(key=lambda pair: (pair[0].rate_rps or 0.0, pair[0].throughput_rps))
    opened = [(point, each) for point, each in chosen if point.rate_rps is not None]
    traces = [_trace("measured", [point for point, _ in opened], [_mean(point, kind) for point, _ in opened], 0)]
    closed = [point for point, _ in chosen if point.rate_rps is None]
    traces.append(_trace("closed loops", closed, [_mean(point, kind) for point in closed], 2, mode="markers"))
    known = [(point, each[f"{kind}_mean"]) for point, each in opened if each is not None]
    if known:
        made = _trace("predicted", [point for point, _ in known], [value for _, value in known], 1)
        errors = [abs(value / (_mean(point, kind) or value) - 1) for point, value in known]
        others = [(sum(errors) - error) / max(len(errors) - 1, 1) for error in errors]
        made["error_y"] = {
            "type": "data",
            "array": [value * other for (_, value), other in zip(known, others, strict=True)],
            "thickness": 1,
            "width": 3,
        }
        made["line"] = {"dash": "dash", "width": 1.5, "color": COLORS[1]}
        traces.append(made)
    knee = found.knee
    if knee is not None:
        traces.append(_trace("knee", [knee], [_mean(knee, kind)], 3, mode="markers", size=15, symbol="star"))
    legend = {"orientation": "h", "y": -0.2, "x": 0}
    # A closed loop of many clients waits a hundred times longer than an open one below the knee.
    above = {"type": "log"}
    axes = layout("requests/s, measured", "seconds", 380, showlegend=True, legend=legend, yaxis=above)
    return {"data": traces, "layout": axes}


def _mean(point: Point, kind: str) -> float | None:
    found: Distribution | None = getattr(point.load.measured, f"{kind}_s")
    return None if found is None else found.mean


def _trace(
    name: str,
    points: Sequence[Point],
    values: Sequence[float | None],
    color: int,
    mode: str = "lines+markers",
    size: int = 8,
    symbol: str = "circle",
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [each.throughput_rps for each in points],
        "y": list(values),
        "text": [each.name for each in points],
        "hovertemplate": "%{text}<br>%{x:.3g} requests/s, %{y:.3g} s",
        "marker": {"color": COLORS[color], "size": size, "symbol": symbol},
        "line": {"color": COLORS[color]},
    }
