"""What a system's runs come to: values for every claim, and the paper's figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.report import charts
from headway.reproduce.claims import Value


@dataclass(frozen=True)
class Finding:
    """For one claim: a value a seed, and in one or two sentences with numbers why they came out so."""

    values: Sequence[Value]
    why: str


@dataclass(frozen=True)
class Figure:
    """A chart: one of the paper's, made anew."""

    label: str
    """The paper's: "Figure 4"."""
    title: str
    shows: str
    """What it shows, and what came out: a sentence or two."""
    chart: charts.Figure
    """Plotly's `data` and `layout` as plain values: `headway.reproduce.charts` makes them."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, made anew. Numbers are shown with three digits."""

    label: str
    title: str
    shows: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]


@dataclass(frozen=True)
class Findings:
    """What `run` returns."""

    outcomes: Mapping[str, Finding]
    """By the claim's id."""
    exhibits: Sequence[Figure | PaperTable] = ()
    """In the paper's order."""
