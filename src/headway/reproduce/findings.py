"""The results of a system's runs: values for every claim, and the paper's figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.report import charts
from headway.reproduce.claims import Value


@dataclass(frozen=True)
class Finding:
    """For one claim: the values by seed, and one or two sentences with the numbers behind them."""

    values: Sequence[Value]
    why: str


@dataclass(frozen=True)
class Figure:
    """A reproduced chart of the paper."""

    label: str
    """The paper's label: "Figure 4"."""
    title: str
    shows: str
    """One or two sentences on what the chart shows."""
    chart: charts.Figure
    """`data` and `layout` of Plotly as plain values, made by `headway.reproduce.charts`."""


@dataclass(frozen=True)
class PaperTable:
    """A reproduced table of the paper. Numbers are shown with three digits."""

    label: str
    title: str
    shows: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class Findings:
    """What `run` returns."""

    outcomes: Mapping[str, Finding]
    """By claim id."""
    exhibits: Sequence[Figure | PaperTable] = ()
    """In the order of the paper."""
