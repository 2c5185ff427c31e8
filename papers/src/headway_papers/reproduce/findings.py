"""The results of a system's runs: values for every claim, and the paper's figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.report import charts
from headway_papers.reproduce.claims import Value


@dataclass(frozen=True)
class Finding:
    """The values of one claim by seed, and one or two sentences with the numbers behind them."""

    values: Sequence[Value]
    why: str


@dataclass(frozen=True)
class Figure:
    """A reproduced chart of the paper."""

    label: str
    """The paper's label, such as "Figure 4"."""
    title: str
    shows: str
    """One or two sentences on the chart."""
    chart: charts.Figure
    """Plotly's `data` and `layout` as plain values, made by `headway_papers.reproduce.charts`."""


Row = list[str | float | None]
"""A row of a table. Numbers are shown with three digits."""


@dataclass(frozen=True)
class PaperTable:
    """A reproduced table of the paper."""

    label: str
    title: str
    shows: str
    heads: Sequence[str]
    rows: Sequence[Row]


Exhibit = Figure | PaperTable


@dataclass(frozen=True)
class Findings:
    """The result of `run`: findings by claim id, and exhibits in the order of the paper."""

    outcomes: Mapping[str, Finding]
    exhibits: Sequence[Exhibit] = ()

    def __add__(self, other: Findings) -> Findings:
        return Findings({**self.outcomes, **other.outcomes}, (*self.exhibits, *other.exhibits))
