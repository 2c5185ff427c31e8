"""A ranking as console text and as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from headway.config.strict_yaml import dump
from headway.metrics.seeds import Estimate
from headway.report.table import percent, seconds, short_number
from headway_papers.arena.metrics import METRICS
from headway_papers.arena.play import Arena, CellResult
from headway_papers.arena.ranking import Standing
from headway_papers.arena.search import Search
from headway_papers.reproduce.markdown import table
from headway_papers.reproduce.text import printed

SHOWN = ("goodput_rps", "slo_attainment", "ttft_s.mean", "ttft_s.p99", "cached_prompt_share")
"""Default metrics of the tables by cell."""
HEADS = ("policy", "regret", "95% interval", "worst cell", "best or tied", "cells")


def shown(metric: str, value: float) -> str:
    unit = METRICS[metric].unit
    return seconds(value) if unit == "s" else percent(value) if unit == "%" else short_number(value)


def with_interval(metric: str, each: Estimate | None) -> str:
    """Text such as "3.21 s ± 120 ms", without an interval if nothing varies."""
    if each is None:
        return "-"
    return shown(metric, each.mean) + (f" ± {shown(metric, each.half)}" if each.half > 0 else "")


def row(each: Standing) -> tuple[str, ...]:
    """The cells of a ranking's row, in the order of `HEADS`."""
    name = f"{each.name} (oracle)" if each.is_oracle else each.name
    if each.regret is None or each.worst is None or each.tied_share is None:
        return name, "-", "-", "-", "-", "0"
    bounds = f"{100 * each.regret.low:.1f} to {100 * each.regret.high:.1f}%" if each.regret.half else "-"
    worst = f"{100 * each.worst:.1f}% ({each.worst_cell})"
    return name, f"{100 * each.regret.mean:.2f}%", bounds, worst, f"{100 * each.tied_share:.0f}%", str(each.num_cells)


def summary(arena: Arena) -> str:
    """The extent of the measurement, in one line."""
    cached = f", {arena.num_found:,} more from the cache" if arena.num_found else ""
    seeds = f"{arena.seeds} seed{'s' if arena.seeds > 1 else ''}"
    what = f"{len(arena.cells)} cells, {seeds}, {arena.num_measured:,} runs in {seconds(arena.wall_s)}{cached}"
    return f"{what}. Regret is the loss of {METRICS[arena.metric].title} against a cell's best policy."


def render(arena: Arena, *, width: int, color: bool = False) -> str:
    """The ranking as a table for a terminal of `width` columns."""
    ranking = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        ranking.add_column(head, justify="left" if head in ("policy", "worst cell") else "right", overflow="fold")
    for each in arena.ranking:
        ranking.add_row(*map(Text, row(each)))
    notes = [Text(note) for note in arena.notes]
    return printed(Group(Text(arena.grid, style="bold"), ranking, Text(summary(arena)), *notes), width, color)


def markdown(arena: Arena, command: str, metrics: Sequence[str] = SHOWN) -> str:
    """The ranking and one table for each of `metrics`, with cells as rows and policies as columns in the ranking's
    order."""
    lines = [f"Written by `{command}`. {summary(arena)}", ""]
    lines += table(HEADS, map(row, arena.ranking))
    names = [each.name for each in arena.ranking if each.num_cells]
    for metric in metrics:
        if any(metric in found for cell in arena.cells for found in cell.metrics.values()):
            lines += ["", f"**{METRICS[metric].title}**", ""]
            lines += table(("cell", *names), ((cell.name, *_values(cell, names, metric)) for cell in arena.cells))
    lines += ["", *(f"- {note}" for note in arena.notes)] if arena.notes else []
    return "\n".join(lines) + "\n"


def _values(cell: CellResult, names: Sequence[str], metric: str) -> list[str]:
    return [with_interval(metric, cell.metrics.get(name, {}).get(metric)) for name in names]


MOST_TRIALS = 10
"""Trials that are printed; `--json` contains all."""
_VERDICTS = {
    "better": "better than the defaults on the test half",
    "indistinguishable": "not to be told from the defaults on the test half: keep these",
    "worse": "worse than the defaults on the test half: the search fitted its training half",
    "defaults": "no trial beat the defaults",
}


def render_search(found: Search, *, width: int, color: bool = False) -> str:
    """The best trials, and the verdict on the winner."""
    names = [each.name for each in found.space]
    trials = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in (*names, "gain", "runs"):
        trials.add_column(head, justify="right")
    for each in found.trials[:MOST_TRIALS]:
        trials.add_row(*(str(each.arguments[name]) for name in names), f"{100 * each.gain:+.2f}%", str(each.num_runs))
    gain, metric = found.test_gain, METRICS[found.metric].title
    bounds = f" ({100 * gain.low:+.2f} to {100 * gain.high:+.2f}%)" if gain.half else ""
    judged = f"{_VERDICTS[found.verdict]}: {100 * gain.mean:+.2f}%{bounds} of {metric} in {found.num_test_runs} runs"
    cached = f", {found.num_found:,} from the cache" if found.num_found else ""
    lines = [
        Text(f"{found.policy}: {judged}.", style="bold"),
        Text(f"{len(found.trials)} trials, {found.num_measured:,} runs in {seconds(found.wall_s)}{cached}."),
    ]
    return printed(Group(trials, *lines), width, color)


def specification(found: Search) -> str:
    """The winner as a scenario's policies."""
    spec = {"name": found.policy, **found.arguments} if found.arguments else found.policy
    return dump({"policies": {found.kind: spec}})
