"""Reports as text and as pages."""

from __future__ import annotations

import re

import pytest

from headway.report.blocks import Chart, Charts, Code, Facts, Heading, Legend, Lines, Report, Section, Table
from headway.report.render import WIDTH, page, text

TABLE = Table(
    ("GPU", "$/h", ""), [["l40s [bold]", "1.86", "the plan"], ["h100", "12.00", ""]], ("GPU",), ("",), {(0, 2): "best"}
)


def test_numbers_stand_to_the_right_and_lines_end_without_spaces() -> None:
    assert text([Heading("Plan"), TABLE]).splitlines() == [
        "Plan",
        "GPU            $/h",
        "l40s [bold]   1.86  the plan",
        "h100         12.00",
    ]


def test_sentences_are_wrapped_for_a_terminal_alone_and_patches_never() -> None:
    sentence, patch = "word " * 60, "-" * 60 + "\n+ line"
    assert text([sentence, patch]).splitlines() == [sentence, *patch.splitlines()]
    shown = text([sentence, patch], 40).splitlines()
    assert max(map(len, shown[:-2])) <= 40 < WIDTH and shown[-2:] == patch.splitlines()
    assert "\x1b[1m" in text([Heading("bold")], 40, color=True) and "\x1b" not in text([Heading("bold")], 40)


def test_a_page_has_all_blocks_and_escapes_what_it_is_given() -> None:
    chart = Chart("drawn", "A <chart>", {"data": [], "layout": {}}, "of `code`")
    body = [Section("<Section>", [chart, TABLE]), Legend([("l40s", "#000")], [("tp 1", "o")]), Code("a < b", "1. x")]
    head = [Facts({"days": "<two>"}), Lines(["see `--out <file>`"], "note")]
    made = page(Report("plan", "<b>", head, body, ["foot"], "<title>"), "headway plan <x>")
    for shown in (
        "Headway: &lt;title&gt;</title>", "<h1>&lt;b&gt;</h1>", "<dd>&lt;two&gt;</dd>", "<h2>&lt;Section&gt;</h2>",
        "see <code>--out &lt;file&gt;</code></p>", '<td class="best text">the plan</td>', "<td>1.86</td>",
        '<td class="name">h100</td>', '<div class="chart" id="drawn">', "<h3>1. x</h3><pre>a &lt; b</pre>",
        '<p class="quiet">foot</p>', "headway plan &lt;x&gt;", 'const charts = {"drawn":',
    ):  # fmt: skip
        assert shown in made, shown


def test_a_column_without_a_name_has_no_heading() -> None:
    """A heading without text is read out as one that is missing."""
    shown = page(Report("plan", "One plan", [], [TABLE]), "headway plan")
    assert "></th>" not in shown and '<thead><tr><th class="name">GPU</th><th>$/h</th><td></td></tr>' in shown


def test_headings_skip_no_level() -> None:
    """Also below a section without a heading, such as a page's first picture: screen readers jump by levels."""
    chart = Chart("first", "First", {"data": [], "layout": {}})
    untitled = Section("", [chart, Code("a", "Code"), Charts([chart])])
    made = page(
        Report("plan", "One plan", [], [untitled, Section("Second", [chart, Heading("Third")])]), "headway plan"
    )
    levels = [int(level) for level in re.findall(r"<h(\d)", made)]
    assert levels == [1, 2, 2, 2, 2, 3, 3]


def test_text_is_not_displayed_where_a_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a console of rich shows its output beside the result: an empty box for each text that is made."""
    said = [Heading("Whole fleets"), TABLE]
    plain = text(said, 80)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *_: pytest.fail("displayed"))
    assert text(said, 80) == plain and "l40s" in plain
