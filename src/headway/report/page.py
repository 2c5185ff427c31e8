"""Common parts of all HTML pages: colours, style sheet, document, table, chart, and writing.

A page has no external links. It loads plotly.js, 4.8 MB, from a file in the same folder that all pages share.
"""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from html import escape
from pathlib import Path

import msgspec

from headway.workload.atomic_file import write_text

COLORS = (
    "#2f6db3", "#d9722e", "#3f9455", "#b5423f", "#7d62a8", "#8a6446", "#cf6fa8", "#5f6b76", "#9a9a24",
    "#26a0ad", "#1f3f6e", "#f0b14a",
)  # fmt: skip
"""One colour per run. Further runs reuse the colours with dashed lines."""

INK = "#20262d"
QUIET = "#67717c"
RULE = "#e4e7eb"

CSS = """
:root { color-scheme: light dark; --ink: #20262d; --quiet: #67717c; --rule: #e4e7eb; --best: #1d7a46; --paper: #fff;
  --raised: #f6f7f9; --edge: #cfd4da; --warm: #fdf8ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --quiet: #98a3ae; --rule: #2c333b; --best: #5fce8d; --paper: #14181d; --raised: #1c2229;
    --edge: #3a434d; --warm: #2b2614; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1216px; margin: 0 auto; padding: 36px 32px 56px; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -0.01em; margin: 2px 0 10px; }
h2 { font-size: 17px; font-weight: 650; margin: 44px 0 2px; }
h3, figure h2 { font-size: 14px; font-weight: 600; margin: 0; }
p { margin: 0; max-width: 78ch; }
.brand, .quiet, figcaption { color: var(--quiet); }
.brand { font-size: 13px; font-weight: 600; letter-spacing: 0.06em; text-transform: uppercase; }
.quiet, figcaption { font-size: 13px; max-width: none; }
.facts { display: flex; flex-wrap: wrap; gap: 6px 32px; margin: 0 0 14px; }
.facts div { min-width: 0; }
.facts dt { font-size: 12px; color: var(--quiet); }
.facts dd { margin: 0; font-variant-numeric: tabular-nums; }
.note { border-left: 3px solid #d9a22e; background: var(--warm); padding: 7px 12px; margin: 10px 0;
  font-size: 14px; max-width: none; }
code, pre { font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--raised); border: 1px solid var(--rule); border-radius: 6px; padding: 12px 14px;
  overflow: auto; max-height: 440px; margin: 8px 0 0; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--quiet); font-size: 14px; }
.scroll { overflow-x: auto; margin-top: 10px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th { font-weight: 600; font-size: 12px; color: var(--quiet); text-align: right; vertical-align: bottom;
  line-height: 1.3; padding: 6px 8px; border-bottom: 1px solid var(--edge); }
td { text-align: right; padding: 6px 8px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th.name, td.name { text-align: left; }
thead td { border-bottom-color: var(--edge); }
th:first-child, td:first-child { padding-left: 2px; }
tbody tr:hover { background: var(--raised); }
td.best { color: var(--best); font-weight: 650; }
td.same { color: var(--best); text-decoration: underline dotted; text-underline-offset: 3px; }
td.text { white-space: normal; text-align: left; min-width: 24ch; }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.chips { position: sticky; top: 0; z-index: 2; display: flex; flex-wrap: wrap; gap: 6px; padding: 10px 0;
  margin-top: 26px; background: var(--paper); border-bottom: 1px solid var(--rule); }
.chips button, .choices select { font: inherit; font-size: 13px; color: var(--ink); background: var(--paper);
  border: 1px solid var(--edge); border-radius: 999px; padding: 2px 11px; cursor: pointer; }
.chips button[aria-pressed="false"] { color: #a3abb3; border-style: dashed; }
.chips button[aria-pressed="false"] .swatch { opacity: 0.25; }
.choices { display: flex; flex-wrap: wrap; gap: 10px; margin: 10px 0 0; }
.choices select { border-radius: 6px; padding: 3px 8px; min-width: 0; max-width: 100%; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(350px, 100%), 1fr)); gap: 22px 24px;
  margin-top: 14px; }
.grid.two { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); }
figure { margin: 0; min-width: 0; position: relative; }
figure :is(h2, h3) { padding-right: 48px; }
.svg { position: absolute; top: 0; right: 0; font: inherit; font-size: 12px; color: var(--quiet); background: none;
  border: 1px solid var(--edge); border-radius: 5px; padding: 0 7px; cursor: pointer; }
.verdict { font-size: 17px; line-height: 1.45; margin: 4px 0 12px; max-width: 90ch; }
.chart { width: 100%; }
.no-charts .svg, .no-charts .chips, .no-charts .choices { display: none; }
footer { margin-top: 48px; padding-top: 14px; border-top: 1px solid var(--rule); }
@media (max-width: 640px) { main { padding: 20px 14px 40px; } h1 { font-size: 21px; } h2 { margin-top: 32px; }
  td.text { min-width: 26ch; } }
@media print { .chips, .choices, .svg { display: none; } main { padding: 0; } h2 { break-after: avoid; } }
"""

DRAW = """
const config = {displaylogo: false, responsive: true, displayModeBar: false};
const dark = matchMedia("(prefers-color-scheme: dark)");
function themed(layout) {
  if (!dark.matches) return layout;
  const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name).trim();
  const own = structuredClone(layout);
  own.paper_bgcolor = own.plot_bgcolor = color("--paper");
  own.font = {...own.font, color: color("--ink")};
  own.hoverlabel = {...own.hoverlabel, bgcolor: color("--raised"), font: {size: 12, color: color("--ink")}};
  for (const [name, axis] of Object.entries(own)) if (/^[xy]axis/.test(name)) {
    Object.assign(axis, {gridcolor: color("--rule"), linecolor: color("--edge"), tickcolor: color("--edge")});
    if (axis.title) axis.title.font = {...axis.title.font, color: color("--quiet")};
  }
  return own;
}
function draw(id, figure) {
  // Plotly leaves the element without a height when it draws anew after the window's size has changed.
  if (figure.layout.height) document.getElementById(id).style.height = `${figure.layout.height}px`;
  Plotly.react(id, figure.data, themed(figure.layout), config);
}
function drawAll() {
  for (const [id, figure] of Object.entries(charts)) draw(id, figure);
}
drawAll();
dark.addEventListener("change", () => { drawAll(); if (typeof showReplicas === "function" && run) showReplicas(); });
for (const button of document.querySelectorAll("button.svg")) button.addEventListener("click", () =>
  Plotly.downloadImage(button.dataset.chart, {format: "svg", filename: button.dataset.chart}));
"""
"""Script that draws the constant `charts`, a map from element ids to Plotly figures, and saves them as SVG."""

CHECK = """
if (typeof Plotly === "undefined") {
  const missing = "No chart: %s is missing. It belongs in the folder of this page.";
  document.body.classList.add("no-charts");
  for (const chart of document.querySelectorAll(".chart")) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = missing;
    chart.replaceChildren(note);
  }
  throw new Error(missing);
}
"""
"""Script at the end that puts a note in place of each chart if plotly.js could not be loaded."""

UNPACK = """
const packed = Uint8Array.from(atob(document.getElementById("page").textContent), c => c.charCodeAt(0));
const script = document.createElement("script");
script.type = "module";
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
script.textContent = await new Response(unpacked).text();
document.head.append(script);
"""
"""Script that unpacks and starts the script in the element `page`."""
_MOST_PLAIN_CHARS = 100_000
"""Maximum length of a script that stays unpacked. Longer scripts are mostly data. The script of a ten-run report
shrinks from 0.8 MB to 0.2 MB."""


def library_name() -> str:
    """The file name of plotly.js that pages load."""
    from plotly.offline import get_plotlyjs_version  # takes 0.1 s, which runs without pages need not spend

    return f"plotly-{get_plotlyjs_version()}.min.js"


def write_page(path: Path, text: str) -> None:
    """Write a page atomically, and plotly.js beside it unless it exists. Raises HeadwayError if writing fails."""
    from plotly.offline import get_plotlyjs

    write_text(path, text)
    library = path.with_name(library_name())
    if not library.exists():
        write_text(library, get_plotlyjs())


def _packed(script: str) -> tuple[str, str]:
    """Elements that hold a packed script, and the script that starts it. A short script stays unpacked."""
    if len(script) <= _MOST_PLAIN_CHARS:
        return "", script
    text = b64encode(gzip.compress(script.encode(), 9, mtime=0)).decode()
    return f'<script type="text/plain" id="page">{text}</script>\n', UNPACK


def document(title: str, body: str, script: str, css: str = "") -> str:
    """A page for `write_page`. Elements of the class `chart` get a note if plotly.js is missing."""
    held, started = _packed(script)
    library = library_name()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Headway: {escape(title)}</title>\n<style>{CSS}{css}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n"
        f'<script src="{library}"></script>\n'
        f'{held}<script type="module">{CHECK % library}{started}</script>\n</body>\n</html>\n'
    )


def literal(value: object) -> str:
    """A value as a JavaScript literal that is safe inside a script element."""
    return msgspec.json.encode(value).decode().replace("</", "<\\/").replace("<!--", "<\\!--")


def facts(listed: Mapping[str, str]) -> str:
    inner = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in listed.items())
    return f'<dl class="facts">{inner}</dl>'


def _head(text: str, is_words: bool) -> str:
    """The head of a column. A column of remarks has no name, and an empty heading would confuse screen readers."""
    if not text:
        return "<td></td>"
    return f'<th class="name">{escape(text)}</th>' if is_words else f"<th>{escape(text)}</th>"


def table(heads: Sequence[str], words: Collection[int], rows: Sequence[str]) -> str:
    """A table, which the keyboard scrolls where it is wider than the screen. Each row is a string of cells.

    `words`: columns that are text.
    """
    cells = [_head(head, i in words) for i, head in enumerate(heads)]
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    inner = f"<table><thead><tr>{''.join(cells)}</tr></thead>\n<tbody>\n{lines}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{inner}</div>'


def chart(name: str, title: str, caption: str, level: int = 3) -> str:
    """The placeholder of the chart with this id. `level`: of its heading."""
    heading = f"<h{level}>{escape(title)}</h{level}>"
    return (
        f"<figure>{heading}{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}"
        f'<button type="button" class="svg" data-chart="{name}" title="Save as SVG">SVG</button>'
        f'<div class="chart" id="{name}"></div></figure>'
    )
