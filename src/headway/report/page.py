"""What all pages are made of. A page is one file that needs nothing else, not even a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec
from plotly.offline import get_plotlyjs

from headway.report.style import CSS

DRAW = """
const config = {displaylogo: false, responsive: true, displayModeBar: false};
for (const [id, figure] of Object.entries(charts)) Plotly.newPlot(id, figure.data, figure.layout, config);
"""
"""Draws `charts`: the element's id -> a Plotly figure."""


def document(title: str, body: str, script: str, css: str = "") -> str:
    """The whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Headway: {escape(title)}</title>\n<style>{CSS}{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f"<script>{get_plotlyjs()}</script>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def literal(value: object) -> str:
    """A value as a script writes it, safe inside a script element."""
    return msgspec.json.encode(value).decode().replace("</", "<\\/").replace("<!--", "<\\!--")


def facts(listed: dict[str, str]) -> str:
    """Names with their values, side by side."""
    inner = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in listed.items())
    return f'<dl class="facts">{inner}</dl>'


def table(heads: Sequence[str], names: int, rows: Sequence[str]) -> str:
    """A table whose first `names` columns are text; a row is its cells."""
    cells = [f'<th class="name">{escape(head)}</th>' for head in heads[:names]]
    cells += [f"<th>{escape(head)}</th>" for head in heads[names:]]
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{"".join(cells)}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'
    )


def chart(name: str, title: str, caption: str) -> str:
    """Where the chart of this id goes."""
    return (
        f"<figure><h3>{escape(title)}</h3><figcaption>{escape(caption)}</figcaption>"
        f'<div class="chart" id="{name}"></div></figure>'
    )
