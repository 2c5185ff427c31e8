"""Plotly figures as pictures (SVG, PNG, PDF, WebP), drawn by matplotlib without a browser.

Supports everything that Headway's figures contain: scatter, bar and heatmap traces; linear, logarithmic and category
axes; panels side by side or in a grid; error bars, filled bands, lines and rectangles (`add_hline`, `add_vrect`),
annotations, legend and title. For another kind of trace a HeadwayError names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from headway.core.errors import HeadwayError
from headway.report.page import COLORS, INK, QUIET, RULE
from headway.workload.atomic_file import open_atomic

# matplotlib's types change between releases.
Drawing: TypeAlias = Any
Axes: TypeAlias = Any
Artist: TypeAlias = Any

SUFFIXES = (".svg", ".png", ".pdf", ".webp")
TRACES = ("scatter", "bar", "heatmap")
_PIXELS_PER_INCH = 100
_POINTS = 72 / _PIXELS_PER_INCH  # points per pixel
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 4)), "longdashdot": "-."}
_FILL_STEPS = {"hv": "post", "vh": "pre", "hvh": "mid"}
_INSTEAD = "save the figure as .html, and open it in a browser"
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "triangle-up": "^", "star": "*"}
_MOST_CATEGORIES = 40
"""With at most this many categories, all have a label."""
_CHARACTER_PIXELS = 8
_SCALE = [[0, "#f3f5f8"], [1, "#163a66"]]
_STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text remains text that can be searched and copied
    "svg.hashsalt": "headway",  # equal figures give equal bytes
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a dollar sign is not mathematics
    "axes.unicode_minus": False,
}
_METADATA = {".svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), ".pdf": {"CreationDate": None}}


def write_picture(figure: Mapping[str, Any], path: Path, width: int, height: int) -> None:
    """Draw a figure's `data` and `layout` with this size in pixels, in the format of the file's suffix.

    Raises HeadwayError if matplotlib is missing, the figure contains unsupported parts, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise HeadwayError(f"{path}: pictures need matplotlib; pip install 'headway[figures]'") from None
    layout = dict(figure.get("layout", {}))
    traces = [trace for trace in figure.get("data", ()) if trace.get("visible", True) is True]
    strange = next((kind for trace in traces if (kind := trace.get("type", "scatter")) not in TRACES), None)
    if strange:
        raise HeadwayError(
            f"{path}: pictures have no traces of the type {strange!r}, only {', '.join(TRACES)}; {_INSTEAD}"
        )
    size = (width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
    font = layout.get("font", {})
    style: Any = _STYLE | {
        "font.size": float(font.get("size", 12)) * _POINTS,
        "text.color": _color(font.get("color", INK)),
        "figure.facecolor": _color(layout.get("paper_bgcolor", "#fff")),
    }
    with matplotlib.rc_context(rc=style):
        drawing: Drawing = Figure(size, dpi=_PIXELS_PER_INCH, layout="constrained")
        FigureCanvasAgg(drawing)  # measures text
        _Canvas(drawing, layout, traces).draw()
        with open_atomic(path) as file:
            scale = 2 if path.suffix in (".png", ".webp") else 1  # sharp on high-resolution screens
            drawing.savefig(
                file, format=path.suffix[1:], metadata=_METADATA.get(path.suffix), dpi=scale * _PIXELS_PER_INCH
            )


class _Canvas:
    """One picture during drawing: its panels by the names of their axes, and its legend entries."""

    def __init__(self, drawing: Drawing, layout: Mapping[str, Any], traces: Sequence[Mapping[str, Any]]) -> None:
        self.drawing = drawing
        self.layout = layout
        self.traces = traces
        self.panels = self._panels()
        self.scales = {panel: (_Scale(layout, panel[0], self), _Scale(layout, panel[1], self)) for panel in self.panels}
        self.legend: list[tuple[str, Artist]] = []

    def _panels(self) -> dict[tuple[str, str], Axes]:
        """The panels in a grid: columns by the domains of x axes, rows by the domains of y axes."""
        named = list(dict.fromkeys(_axes(trace) for trace in self.traces)) or [("x", "y")]
        domains = {name: tuple(_axis(self.layout, name).get("domain", (0.0, 1.0))) for pair in named for name in pair}
        columns = sorted({domains[x] for x, _ in named})
        rows = sorted({domains[y] for _, y in named}, reverse=True)
        grid = self.drawing.add_gridspec(
            len(rows),
            len(columns),
            width_ratios=[high - low for low, high in columns],
            height_ratios=[high - low for low, high in rows],
        )
        return {
            (x, y): self.drawing.add_subplot(grid[rows.index(domains[y]), columns.index(domains[x])]) for x, y in named
        }

    def draw(self) -> None:
        groups = {panel: [t for t in self.traces if _axes(t) == panel] for panel in self.panels}
        for panel, axes in self.panels.items():
            self._frame(axes, panel)
            bars = [trace for trace in groups[panel] if trace.get("type") == "bar"]
            _Bars(bars, self, panel).draw()
            for trace in groups[panel]:
                if trace.get("type") == "heatmap":
                    self._heatmap(axes, panel, trace)
                elif trace.get("type", "scatter") == "scatter":
                    self._scatter(axes, panel, trace)
            for scale, which in zip(self.scales[panel], "xy", strict=True):
                scale.apply(axes, which)
        for shape in self.layout.get("shapes", ()):
            self._shape(shape)
        for note in self.layout.get("annotations", ()):
            self._annotation(note)
        self._heading()

    def _frame(self, axes: Axes, panel: tuple[str, str]) -> None:
        axes.set_facecolor(_color(self.layout.get("plot_bgcolor", "#fff")))
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side, name in (("bottom", panel[0]), ("left", panel[1])):
            axes.spines[side].set_color(_color(_axis(self.layout, name).get("linecolor", "#c9ced4")))

    def color(self, trace: Mapping[str, Any]) -> str:
        """Plotly's default colour if the trace names none."""
        return COLORS[next(i for i, each in enumerate(self.traces) if each is trace) % len(COLORS)]

    def listed(self, trace: Mapping[str, Any], artist: Artist) -> None:
        """Add a legend entry for the trace, unless the figure hides it."""
        if trace.get("showlegend", True) and trace.get("name"):
            self.legend.append((_plain(trace["name"]), artist))

    def _scatter(self, axes: Axes, panel: tuple[str, str], trace: Mapping[str, Any]) -> None:
        across, up = self.scales[panel]
        x, y = across.positions(trace.get("x"), len(_list(trace.get("y")))), up.positions(trace.get("y"), 0)
        line, marker = trace.get("line", {}), trace.get("marker", {})
        mode = trace.get("mode") or ("lines+markers" if len(x) <= 20 else "lines")
        own = self.color(trace)
        color = _color(line.get("color") or _single(marker.get("color")) or own)
        opacity = float(trace.get("opacity", 1.0))
        shape = line.get("shape", "linear")
        if trace.get("fill") not in (None, "none"):
            faint = 1.0 if trace.get("fillcolor") else 0.5
            fill = {"facecolor": _color(trace.get("fillcolor") or color), "alpha": opacity * faint, "linewidth": 0}
            if trace["fill"] == "toself":
                axes.fill(x, y, **fill)
            elif trace["fill"] == "tozeroy":
                axes.fill_between(x, y, step=_FILL_STEPS.get(shape), **fill)
            else:
                raise HeadwayError(f"pictures have no fill {trace['fill']!r}, only toself and tozeroy; {_INSTEAD}")
        width = float(line.get("width", 2.0)) * _POINTS
        drawn = axes.plot(
            x,
            y,
            color=color,
            alpha=opacity,
            linewidth=width if "lines" in mode else 0,
            linestyle=_DASHES.get(line.get("dash", "solid"), "-"),
            drawstyle=f"steps-{_FILL_STEPS[shape]}" if shape in _FILL_STEPS else "default",
        )[0]
        if "markers" in mode:
            drawn.set(
                marker=_MARKERS.get(_single(marker.get("symbol")) or "circle", "o"),
                markeredgewidth=0,
                markersize=float(_single(marker.get("size")) or 6) * _POINTS,
                markerfacecolor=_color(_single(marker.get("color")) or color),
            )
        if "text" in mode:
            for at, height, text in zip(x, y, _list(trace.get("text")), strict=False):
                axes.annotate(_plain(text), (at, height), (0, 4), textcoords="offset points", ha="center")
        _errors(axes, trace, x, y, color)
        if "lines" in mode or "markers" in mode:
            self.listed(trace, drawn)

    def _heatmap(self, axes: Axes, panel: tuple[str, str], trace: Mapping[str, Any]) -> None:
        from matplotlib.colors import LinearSegmentedColormap

        table = np.array([[np.nan if cell is None else cell for cell in row] for row in _list(trace.get("z"))], float)
        across, up = self.scales[panel]
        x = _edges(across.positions(trace.get("x"), table.shape[1]))
        y = _edges(up.positions(trace.get("y"), table.shape[0]))
        stops: Any = trace.get("colorscale") or _SCALE
        colors: Any = LinearSegmentedColormap.from_list("", [(at, _color(color)) for at, color in stops])
        drawn = axes.pcolormesh(
            x, y, table, cmap=colors, vmin=trace.get("zmin"), vmax=trace.get("zmax"), rasterized=True
        )
        for row, texts in enumerate(_list(trace.get("text"))):
            for column, text in enumerate(texts):
                middle = ((x[column] + x[column + 1]) / 2, (y[row] + y[row + 1]) / 2)
                light = sum(colors(drawn.norm(table[row, column]))[:3]) > 1.6
                axes.text(*middle, _plain(text), ha="center", va="center", color=INK if light else "#fff")
        if trace.get("showscale", True):
            bar = self.drawing.colorbar(drawn, ax=axes, aspect=30, pad=0.02)
            bar.outline.set_visible(False)
            bar.set_label(_plain(_text(trace.get("colorbar", {}).get("title"))), color=QUIET)
            bar.ax.tick_params(colors=INK, length=0)
            bar.ax.yaxis.set_major_formatter(lambda value, _: _number(value))

    def _shape(self, shape: Mapping[str, Any]) -> None:
        from matplotlib.patches import Rectangle

        axes, transform = self._reference(shape)
        line = shape.get("line", {})
        ends = self._points(axes, shape, ("x0", "x1"), ("y0", "y1"))
        color, width = _color(line.get("color", QUIET)), float(line.get("width", 2.0)) * _POINTS
        style, opacity = _DASHES.get(line.get("dash", "solid"), "-"), float(shape.get("opacity", 1.0))
        if shape.get("type") == "line":
            (left, right), (low, high) = ends
            axes.plot(
                [left, right],
                [low, high],
                color=color,
                linewidth=width,
                linestyle=style,
                alpha=opacity,
                transform=transform,
                scalex=False,
                scaley=False,
            )
        elif shape.get("type") == "rect":
            (left, right), (low, high) = ends
            face = _color(shape["fillcolor"]) if shape.get("fillcolor") else "none"
            box = Rectangle((left, low), right - left, high - low, facecolor=face, edgecolor=color, linewidth=width)
            box.set(transform=transform, alpha=opacity, linestyle=style)
            axes.add_artist(box)
        else:
            raise HeadwayError(f"pictures have no shape {shape.get('type')!r}, only line and rect; {_INSTEAD}")

    def _annotation(self, note: Mapping[str, Any]) -> None:
        axes, transform = self._reference(note)
        ((x,), (y,)) = self._points(axes, note, ("x",), ("y",))
        font = note.get("font", {})
        where = {"left": "left", "right": "right"}.get(note.get("xanchor", ""), "center")
        edge = {"top": "top", "bottom": "bottom"}.get(note.get("yanchor", ""), "center")
        words = {"color": _color(font.get("color", INK)), "ha": where, "va": edge}
        if font.get("size"):
            words["fontsize"] = float(font["size"]) * _POINTS
        if note.get("showarrow", True):
            offset = (float(note.get("ax", -10)) * _POINTS, -float(note.get("ay", -30)) * _POINTS)
            arrow = {"arrowstyle": "->", "color": _color(note.get("arrowcolor", QUIET))}
            axes.annotate(
                _plain(note.get("text")),
                (x, y),
                offset,
                transform,
                "offset points",
                arrow,
                **words,
            )
        else:
            axes.text(x, y, _plain(note.get("text")), transform=transform, **words)

    def _reference(self, placed: Mapping[str, Any]) -> tuple[Axes, Any]:
        """The panel of a shape or an annotation, and the meaning of its coordinates."""
        from matplotlib.transforms import blended_transform_factory

        refs = [str(placed.get(name) or "paper") for name in ("xref", "yref")]
        names = [ref.partition(" ")[0] for ref in refs]
        panel = next(
            (p for p in self.panels if all(n in ("paper", own) for n, own in zip(names, p, strict=True))), None
        )
        axes = self.panels[panel] if panel else next(iter(self.panels.values()))
        whole = self.drawing.transFigure if names == ["paper", "paper"] and len(self.panels) > 1 else axes.transAxes
        ways = [whole if ref == "paper" else axes.transAxes if " domain" in ref else axes.transData for ref in refs]
        return axes, blended_transform_factory(*ways)

    def _points(
        self, axes: Axes, placed: Mapping[str, Any], x: Sequence[str], y: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """Coordinates on the panel's scales, or as shares of its width and height."""
        panel = next(name for name, each in self.panels.items() if each is axes)
        found: list[list[float]] = []
        for scale, keys, ref in zip(self.scales[panel], (x, y), ("xref", "yref"), strict=True):
            values = [placed.get(key, 0.5) for key in keys]
            is_share = str(placed.get(ref) or "paper").endswith(("paper", "domain"))
            found.append([float(each) for each in values] if is_share else scale.positions(values, len(values)))
        return found[0], found[1]

    def _heading(self) -> None:
        """Title and legend, above the panels."""
        title = _plain(_text(self.layout.get("title")))
        bold = {"weight": "bold", "size": 1.2 * float(self.layout.get("font", {}).get("size", 12)) * _POINTS}
        shown = self.layout.get("showlegend")
        if self.legend and (len(self.legend) > 1 if shown is None else shown):
            self._legend(title or None, bold)
        elif title:
            self.drawing.suptitle(title, x=0.01, ha="left", fontproperties=bold)

    def _legend(self, title: str | None, bold: Mapping[str, Any]) -> None:
        """Draw the legend in as few rows as the width allows."""
        names, artists = zip(*self.legend, strict=True)
        most_px = self.drawing.bbox.width - 20
        for rows in range(1, len(names) + 1):
            legend = self.drawing.legend(
                artists,
                names,
                loc="outside upper left",
                ncols=-(-len(names) // rows),
                frameon=False,
                columnspacing=1.6,
                handlelength=1.8,
                borderaxespad=0.3,
                title=title,
                title_fontproperties=bold,
                alignment="left",
            )
            if rows == len(names) or legend.get_window_extent().width <= most_px:
                return
            legend.remove()


class _Scale:
    """One axis: the positions of its values, and its labels."""

    def __init__(self, layout: Mapping[str, Any], name: str, canvas: _Canvas) -> None:
        self.axis = _axis(layout, name)
        which = name[0]
        values = [v for t in canvas.traces if name in _axes(t) for v in _list(t.get(which)) if v is not None]
        self.is_category = self.axis.get("type") == "category" or any(isinstance(value, str) for value in values)
        ordered = [*_list(self.axis.get("categoryarray")), *values]
        self.categories = list(dict.fromkeys(map(str, ordered))) if self.is_category else []
        self.is_log = self.axis.get("type") == "log"
        self.has_bars = any(t.get("type") == "bar" for t in canvas.traces if name in _axes(t))

    def positions(self, values: Any, num_values: int) -> list[float]:
        """Coordinates; NaN for missing values. Without values: 0, 1, 2 and so on."""
        listed = _list(values) if values is not None else list(range(num_values))
        if self.is_category:
            known = {each: float(i) for i, each in enumerate(self.categories)}
            return [
                known.get(str(each), float("nan")) if not _is_place(each, known) else float(each) for each in listed
            ]
        return [float("nan") if each is None else float(each) for each in listed]

    def apply(self, axes: Axes, which: str) -> None:
        """Set scale, range, ticks, grid and title."""
        own = axes.xaxis if which == "x" else axes.yaxis
        if self.is_log:
            (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        self._limits(axes, which)
        self._ticks(own)
        quiet = _color(self.axis.get("title", {}).get("font", {}).get("color", QUIET) if self._has_title() else QUIET)
        own.set_label_text(_plain(_text(self.axis.get("title"))), color=quiet)
        if self.axis.get("showgrid", not self.is_category):
            own.grid(True, color=_color(self.axis.get("gridcolor", RULE)), linewidth=0.8)
        shown = self.axis.get("showticklabels", True)
        tick = _color(self.axis.get("tickcolor", "#c9ced4"))
        own.set_tick_params(which="both", color=tick, labelcolor=INK, length=3 if shown else 0, labelleft=shown)
        own.set_tick_params(which="minor", length=0)
        if not shown:
            own.set_ticklabels([])

    def _has_title(self) -> bool:
        return isinstance(self.axis.get("title"), Mapping)

    def _limits(self, axes: Axes, which: str) -> None:
        reach = axes.set_xlim if which == "x" else axes.set_ylim
        low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
        if self.axis.get("range"):
            low, high = (10.0**each if self.is_log else float(each) for each in self.axis["range"])
        elif self.is_category and self.categories:
            low, high = -0.5, len(self.categories) - 0.5
        elif not self.is_log and (self.axis.get("rangemode") == "tozero" or self.has_bars) and axes.has_data():
            lim = axes.dataLim.intervalx if which == "x" else axes.dataLim.intervaly
            low, high = (0.0, high) if lim[0] >= 0 else (low, 0.0) if lim[1] <= 0 else (low, high)
        if self.axis.get("autorange") == "reversed":
            low, high = high, low
        reach(low, high)

    def _ticks(self, own: Any) -> None:
        from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter

        texts = _list(self.axis.get("ticktext"))
        if self.is_category:
            step = max(1, -(-len(self.categories) // _MOST_CATEGORIES))
            own.set_major_locator(FixedLocator(range(0, len(self.categories), step)))
            shown = self.categories[::step]
            room_px = own.axes.get_position().width * own.get_figure().bbox.width / max(len(shown), 1)
            if own.axis_name == "x" and max(map(len, shown), default=0) * _CHARACTER_PIXELS > room_px:
                own.set_tick_params(rotation=30)
                for label in own.get_ticklabels():
                    label.set(ha="right", rotation_mode="anchor")
            own.set_major_formatter(FuncFormatter(lambda at, _: _at(self.categories, at)))
            return
        if self.axis.get("tickvals") is not None:
            at = self.positions(self.axis["tickvals"], 0)
            own.set_major_locator(FixedLocator(at))
            if texts:
                named = dict(zip(at, map(_plain, texts), strict=False))
                own.set_major_formatter(FuncFormatter(lambda value, _: named.get(value, "")))
                return
        elif self.is_log:
            low, high = sorted(own.get_view_interval())
            few = high <= 2000 * low
            own.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
        else:
            own.set_major_locator(MaxNLocator(nbins=7 if own.axis_name == "x" else 6, steps=[1, 2, 2.5, 5, 10]))
        own.set_major_formatter(FuncFormatter(lambda value, _: self._label(value)))
        own.set_minor_formatter(NullFormatter())

    def _label(self, value: float) -> str:
        spec = str(self.axis.get("tickformat") or "").replace("~", "")
        try:
            text = format(value, spec) if spec else _number(value)
        except ValueError:  # one of d3's formats that Python lacks
            text = _number(value)
        return f"{self.axis.get('tickprefix', '')}{text}{self.axis.get('ticksuffix', '')}"


class _Bars:
    """The bars of a panel, side by side or stacked."""

    def __init__(self, traces: Sequence[Mapping[str, Any]], canvas: _Canvas, panel: tuple[str, str]) -> None:
        self.traces = traces
        self.canvas = canvas
        self.panel = panel
        self.is_stacked = canvas.layout.get("barmode") in ("stack", "relative")
        self.is_over = canvas.layout.get("barmode") == "overlay"

    def draw(self) -> None:
        together = 1.0 - float(self.canvas.layout.get("bargap", 0.2))
        num_beside = 1 if self.is_stacked or self.is_over else max(len(self.traces), 1)
        tops: dict[float, float] = {}
        for i, trace in enumerate(self.traces):
            flat = trace.get("orientation") == "h"
            across, up = self.canvas.scales[self.panel][:: -1 if flat else 1]
            heights = up.positions(trace.get("x" if flat else "y"), 0)
            at = across.positions(trace.get("y" if flat else "x"), len(heights))
            unit = min(np.diff(sorted(set(at))), default=1.0)
            thick = together * unit / num_beside
            shift = 0.0 if num_beside == 1 else (i - (num_beside - 1) / 2) * thick
            feet = [tops.get(each, 0.0) if self.is_stacked else 0.0 for each in at]
            places = [each + shift for each in at]
            self._row(trace, flat, places, heights, thick, feet)
            if self.is_stacked:
                tops |= {each: foot + height for each, foot, height in zip(at, feet, heights, strict=True)}

    def _row(
        self,
        trace: Mapping[str, Any],
        flat: bool,
        at: list[float],
        heights: list[float],
        thick: float,
        feet: list[float],
    ) -> None:
        axes = self.canvas.panels[self.panel]
        marker = trace.get("marker", {})
        own = marker.get("color") or self.canvas.color(trace)
        color = [_color(each) for each in own] if isinstance(own, list | tuple) else _color(own)
        opacity = float(trace.get("opacity", marker.get("opacity", 1.0)))
        if flat:
            drawn = axes.barh(at, heights, thick, feet, color=color, alpha=opacity, linewidth=0)
            _errors(axes, trace, heights, at, INK)
        else:
            drawn = axes.bar(at, heights, thick, feet, color=color, alpha=opacity, linewidth=0)
            _errors(axes, trace, at, [foot + height for foot, height in zip(feet, heights, strict=True)], INK)
        if trace.get("text") is not None:
            axes.bar_label(drawn, [_plain(text) for text in _list(trace["text"])], padding=2)
        self.canvas.listed(trace, drawn)


def _errors(axes: Axes, trace: Mapping[str, Any], x: list[float], y: list[float], color: str) -> None:
    for which in ("x", "y"):
        error = trace.get(f"error_{which}") or {}
        if not error.get("visible", True) or error.get("array") is None:
            continue
        above = [0.0 if each is None else float(each) for each in _list(error["array"])]
        is_same = error.get("symmetric", True) or error.get("arrayminus") is None
        below = above if is_same else [0.0 if each is None else float(each) for each in _list(error["arrayminus"])]
        axes.errorbar(
            x,
            y,
            **{f"{which}err": [below, above]},
            fmt="none",
            ecolor=_color(error.get("color") or color),
            elinewidth=float(error.get("thickness", 2.0)) * _POINTS,
            capsize=float(error.get("width", 4.0)) * _POINTS,
            capthick=float(error.get("thickness", 2.0)) * _POINTS,
        )


def _axes(trace: Mapping[str, Any]) -> tuple[str, str]:
    return str(trace.get("xaxis") or "x"), str(trace.get("yaxis") or "y")


def _axis(layout: Mapping[str, Any], name: str) -> Any:
    """The settings of an axis, which traces call `x`, `y`, `x2` and so on."""
    found = layout.get(f"{name[0]}axis{name[1:]}", {})
    if found.get("overlaying"):
        raise HeadwayError(f"pictures have no axis over another, as {name} is; {_INSTEAD}")
    return found


def _list(values: Any) -> list[Any]:
    return [] if values is None else values.tolist() if isinstance(values, np.ndarray) else list(values)


def _single(value: Any) -> Any:
    """The first of several values, because all markers of a trace look alike."""
    return next(iter(value), None) if isinstance(value, list | tuple | np.ndarray) else value


def _is_place(value: Any, known: Mapping[str, float]) -> bool:
    """Whether a number on a category axis is a coordinate, as in a shape, and not a category."""
    return isinstance(value, int | float) and str(value) not in known


def _at(categories: Sequence[str], at: float) -> str:
    return _plain(categories[int(at)]) if 0 <= int(at) < len(categories) else ""


def _edges(middles: list[float]) -> Any:
    """The edges of cells, computed from their centres."""
    at = np.asarray(middles)
    if len(at) == 1:
        return np.array([at[0] - 0.5, at[0] + 0.5])
    between = (at[1:] + at[:-1]) / 2
    return np.concatenate([[2 * at[0] - between[0]], between, [2 * at[-1] - between[-1]]])


def _number(value: float) -> str:
    """A number with as few digits as distinguish ticks: 1,500 and 0.05."""
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def _text(title: Any) -> str:
    return str((title.get("text") if isinstance(title, Mapping) else title) or "")


def _plain(text: Any) -> str:
    """Text without Plotly's HTML: line breaks are converted, other elements are removed."""
    words = re.sub(r"<br\s*/?>", "\n", str("" if text is None else text))
    return re.sub(r"</?(b|i|em|strong|sub|sup|span|a)\b[^>]*>", "", words)


def _color(color: Any) -> Any:
    """A CSS colour in matplotlib's notation."""
    parts = re.fullmatch(r"rgba?\(([^)]*)\)", str(color).replace(" ", ""))
    if not parts:
        return color
    numbers = [float(each) for each in parts[1].split(",")]
    return (*(each / 255 for each in numbers[:3]), *numbers[3:])
