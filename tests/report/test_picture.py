"""Pictures of figures: what is drawn where, in every format, and without a browser."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import HeadwayError
from headway.report.charts import layout
from headway.report.page import COLORS
from headway.report.picture import write_picture

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["slow & steady", "$2 per hour", "_private"]


def lines(**axes: Any) -> dict[str, Any]:
    data = [
        {"type": "scatter", "name": name, "x": [1, 10, 100], "y": [i, 1 + i, 2 + i]} for i, name in enumerate(NAMES)
    ]
    return {"data": data, "layout": layout("rate (requests/s)", "TTFT (s)", showlegend=True, **axes)}


def drawn(figure: dict[str, Any], folder: Path, name: str = "figure.svg") -> ElementTree.Element:
    path = folder / name
    write_picture(figure, path, 700, 400)
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def texts(svg: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in svg.iter(f"{SVG}text")]


def points(svg: ElementTree.Element, color: str) -> list[tuple[float, float]]:
    """The corners of the longest line of this colour."""
    paths = [each for each in svg.iter(f"{SVG}path") if f"stroke: {color}" in each.get("style", "")]
    found = [re.findall(r"[ML] (\S+) (\S+)", each.get("d", "")) for each in paths]
    return [(float(x), float(y)) for x, y in max(found, key=len)]


def steps(values: Iterable[float]) -> list[float]:
    return [after - before for before, after in pairwise(values)]


def test_words_of_the_figure_are_words_of_the_picture(tmp_path: Path) -> None:
    figure = lines()
    figure["layout"] |= {"title": {"text": "One<br>and <b>two</b>"}}
    figure["layout"]["annotations"] = [{"x": 1, "y": 1, "xref": "x", "yref": "y", "text": "here", "showarrow": False}]
    shown = texts(drawn(figure, tmp_path))
    for word in (*NAMES, "rate (requests/s)", "TTFT (s)", "One", "and two", "here"):
        assert shown.count(word) == 1, word
    figure["layout"]["showlegend"] = False
    assert not set(NAMES) & set(texts(drawn(figure, tmp_path)))


def test_values_lie_where_the_axes_say(tmp_path: Path) -> None:
    """Equal differences are equal distances on a linear axis, equal ratios on a logarithmic one."""
    linear = points(drawn(lines(), tmp_path), COLORS[0])
    across = steps(x for x, _ in linear)
    assert across[1] / across[0] == pytest.approx(10, rel=1e-3) and across[0] > 0
    up = steps(y for _, y in linear)
    assert up[0] == pytest.approx(up[1], rel=1e-3) and up[0] < 0, "SVG counts downwards"
    logarithmic = points(drawn(lines(xaxis={"type": "log"}), tmp_path), COLORS[0])
    across = steps(x for x, _ in logarithmic)
    assert across[0] == pytest.approx(across[1], rel=1e-3)
    flipped = points(drawn(lines(yaxis={"autorange": "reversed"}), tmp_path), COLORS[0])
    assert all(step > 0 for step in steps(y for _, y in flipped))


def test_categories_keep_the_order_that_the_figure_gives(tmp_path: Path) -> None:
    data = [{"type": "scatter", "mode": "lines", "x": [1, 2, 3], "y": ["b", "c", "a"]}]
    axis = {"type": "category", "categoryarray": ["a", "b", "c"]}
    svg = drawn({"data": data, "layout": layout("x", "", yaxis=axis)}, tmp_path)
    heights = [-y for _, y in points(svg, COLORS[0])]
    assert heights[2] < heights[0] < heights[1]
    assert [word for word in texts(svg) if word in ("a", "b", "c")] == ["a", "b", "c"]


def test_stacked_bars_stand_on_one_another_and_others_side_by_side(tmp_path: Path) -> None:
    data = [
        {"type": "bar", "name": name, "x": ["p"], "y": [2], "marker": {"color": color}}
        for name, color in (("one", "#aa0000"), ("two", "#00aa00"))
    ]

    def box(mode: str, color: str) -> tuple[float, float, float, float]:
        svg = drawn({"data": data, "layout": layout("", "s") | {"barmode": mode}}, tmp_path)
        path = next(e for e in svg.iter(f"{SVG}path") if f"fill: {color}" in e.get("style", "") and e.get("clip-path"))
        corners = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
        return (
            min(x for x, _ in corners),
            max(x for x, _ in corners),
            min(y for _, y in corners),
            max(y for _, y in corners),
        )

    below, above = box("stack", "#aa0000"), box("stack", "#00aa00")
    assert below[:2] == above[:2] and above[3] == pytest.approx(below[2])
    left, right = box("group", "#aa0000"), box("group", "#00aa00")
    assert left[2:] == right[2:] and left[1] <= right[0] + 0.01


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.svg", b"<?xml"),
        ("a.png", b"\x89PNG"),
        *(pytest.param(*each, marks=pytest.mark.ci) for each in (("a.pdf", b"%PDF"), ("a.webp", b"RIFF"))),
    ],
)
def test_every_format_is_the_same_bytes_again(name: str, start: bytes, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        write_picture(lines(), tmp_path / name, 700, 400)
        found.append((tmp_path / name).read_bytes())
    assert found[0].startswith(start) and found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": [{"type": "pie", "values": [1]}]}, "no traces of the type 'pie', only scatter, bar, heatmap"),
        ({"data": [{"x": [1], "y": [1], "fill": "tonexty"}]}, "no fill 'tonexty'"),
        ({"layout": {"shapes": [{"type": "circle"}]}}, "no shape 'circle', only line and rect"),
        ({"data": [{"x": [1], "y": [1], "yaxis": "y2"}], "layout": {"yaxis2": {"overlaying": "y"}}}, "as y2 is"),
    ],
)
def test_what_cannot_be_drawn_is_named_and_nothing_written(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=f"{message}.*html"):
        write_picture(lines() | change, tmp_path / "figure.svg", 700, 400)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HeadwayError, match=r"figure\.svg: pictures need matplotlib; pip install 'headway\[figures\]'"):
        write_picture(lines(), tmp_path / "figure.svg", 700, 400)
