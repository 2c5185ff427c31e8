"""A reproduction as one HTML page: claims, figures and tables, method."""

from __future__ import annotations

from html import escape

from headway import __version__
from headway.metrics.interval import LEVEL
from headway.report.page import DRAW, document, facts, literal, table
from headway.report.table import seconds, short_number
from headway_papers.reproduce.claims import Word
from headway_papers.reproduce.findings import Exhibit, Figure
from headway_papers.reproduce.reproduction import ClaimResult, Reproduced, SentenceResult
from headway_papers.reproduce.text import MARKS, contains, counted, experiment_of, result_of

CSS = """
.claims td { vertical-align: top; padding-top: 9px; padding-bottom: 9px; }
.claims td.verdict { text-align: left; font-weight: 650; }
.claims td.claim { min-width: 230px; }
.claims td.result { text-align: left; min-width: 130px; white-space: normal; }
.claims .rule { color: var(--quiet); font-size: 12px; }
.holds { color: #1d7a46; } .exceeds { color: #1f6f8b; } .refuted { color: #b5423f; } .undecided { color: #96690c; }
.mark { display: inline-block; width: 20px; height: 20px; line-height: 20px; border-radius: 50%; text-align: center;
  color: #fff; margin-right: 7px; font-size: 12px; }
.holds .mark { background: #1d7a46; } .exceeds .mark { background: #1f6f8b; }
.refuted .mark { background: #b5423f; } .undecided .mark { background: #96690c; }
@media (prefers-color-scheme: dark) {
  .holds { color: #5fce8d; } .exceeds { color: #6fbfe0; } .refuted { color: #f08e8a; } .undecided { color: #d9a22e; }
}
.exhibits { grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 34px 28px; }
.exhibits figcaption { margin-bottom: 4px; }
.exhibits .wide { grid-column: 1 / -1; }
footer h2 { margin-top: 10px; } footer p { margin-top: 8px; }
"""


def page(reproduced: Reproduced, command: str) -> str:
    charts = {f"exhibit-{i}": each.chart for i, each in enumerate(reproduced.exhibits) if isinstance(each, Figure)}
    blocks = "\n".join(_exhibit(i, each) for i, each in enumerate(reproduced.exhibits))
    exhibits = f'<section>\n<h2>Figures and tables</h2>\n<div class="grid exhibits">{blocks}</div>\n</section>'
    parts = [
        _header(reproduced),
        *map(_sentence, reproduced.result.abstract),
        _claims(reproduced),
        exhibits if reproduced.exhibits else "",
        _method(reproduced, command),
    ]
    script = f"const charts = {literal(charts)};\n{DRAW}"
    return document(reproduced.title, "\n".join(parts), script, CSS)


def _header(reproduced: Reproduced) -> str:
    result = reproduced.result
    about = {
        "Claims": counted(result.counts),
        "Seeds": str(result.seeds),
        "Took": seconds(result.wall_s),
        "Headway": __version__,
    }
    quick = "A quick run: fewer seeds and requests than the full one, so that more remains undecided."
    note = f'<p class="note">{quick}</p>' if result.quick else ""
    brand = f'<div class="brand">Headway · reproduce {escape(result.system)}</div>'
    return f"<header>\n{brand}\n<h1>{escape(reproduced.title)}</h1>\n{facts(about)}{note}\n</header>"


def _claims(reproduced: Reproduced) -> str:
    rows = [_row(row) for row in reproduced.result.claims]
    claims_table = table(["", "id", "claim", "paper", "Headway, and what the rule asks for", "why"], range(6), rows)
    return f'<section class="claims">\n<h2>Claims</h2>\n{claims_table}\n</section>'


def _sentence(sentence: SentenceResult) -> str:
    """A sentence of the abstract with its readings."""
    rows = [
        f'{_verdict(each.verdict)}<td class="text claim">{escape(each.reading)}</td><td class="text">{each.chosen}</td>'
        f'<td class="text">{escape(str(each.paper))}</td><td class="result">{escape(each.headway)}</td>'
        f'<td class="text">{contains(each)}</td><td class="name"><code>{escape(each.claim)}</code></td>'
        for each in sentence.readings
    ]
    readings = table(["", "reading", "chosen", "paper", "Headway", "contains", "id"], range(7), rows)
    before = f"<p>{escape(result_of(sentence))}</p><p>{escape(experiment_of(sentence))}</p>"
    return f'<section class="claims">\n<h2>{escape(sentence.says)}</h2>\n{before}\n{readings}\n</section>'


def _row(row: ClaimResult) -> str:
    return (
        f'{_verdict(row.verdict)}<td class="name"><code>{escape(row.id)}</code></td>'
        f'<td class="text claim">{escape(row.claim)}</td><td class="text">{escape(str(row.paper))}</td>'
        f'<td class="result">{escape(row.headway)}<div class="rule">{escape(row.rule)}</div></td>'
        f'<td class="text">{escape(row.why)}</td>'
    )


def _verdict(word: Word) -> str:
    return f'<td class="verdict {word}"><span class="mark" aria-hidden="true">{MARKS[word]}</span>{word}</td>'


def _exhibit(i: int, each: Exhibit) -> str:
    head = f"<h3>{escape(each.label)}: {escape(each.title)}</h3><figcaption>{escape(each.shows)}</figcaption>"
    if isinstance(each, Figure):
        return f'<figure>{head}<div class="chart" id="exhibit-{i}"></div></figure>'
    rows = ["".join(map(_cell, row)) for row in each.rows]
    wide = ' class="wide"' if len(each.heads) > 5 else ""
    return f"<figure{wide}>{head}{table(each.heads, (0,), rows)}</figure>"


def _cell(value: str | float | None) -> str:
    if isinstance(value, str):
        return f'<td class="name">{escape(value)}</td>'
    return f"<td>{'-' if value is None else short_number(value)}</td>"


def _method(reproduced: Reproduced, command: str) -> str:
    result = reproduced.result
    again = f" {reproduced.num_found:,} more were in the cache." if reproduced.num_found else ""
    seeds = f"{result.seeds} seeds (0 to {result.seeds - 1})" if result.seeds > 1 else "1 seed (0)"
    level = f"{100 * LEVEL:.0f}%"
    return f"""<footer>
<h2>Method</h2>
<p>Rules were fixed before the full run. A rule looks at one value a seed, for {seeds}; seeds change arrivals and
lengths, and systems that are compared see the same ones. In brackets: Student's t interval of the mean at {level}. A
claim holds where the whole interval meets the rule, is refuted where the whole interval lies on the wrong side of it,
exceeds the paper where it lies beyond the rule's limit on the paper's side, and is undecided where the interval has
parts on both sides, as one seed alone leaves it. Unless a row argues for another
share, the threshold is half of the paper's effect. Error bars are such intervals, too.</p>
<p>{reproduced.num_measured:,} measurements in {seconds(result.wall_s)}.{again} Headway {__version__}.</p>
<p class="quiet">Command: <code>{escape(command)}</code></p>
</footer>"""
