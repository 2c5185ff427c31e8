"""Results of runs: tables, Arrow, pandas, Polars, figures, and notebook output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from headway.api.arguments import checked
from headway.api.figures import Figure
from headway.config.scenario import Scenario, variants
from headway.core.errors import HeadwayError, unknown
from headway.core.record import Outcome, Records
from headway.metrics.latency import sample
from headway.metrics.seeds import Estimate, SeededMetrics
from headway.metrics.summary import BREAKDOWNS, Summary, flatten
from headway.report import charts, dots, html
from headway.report.run import Run, named_by_policies
from headway.report.table import render
from headway.scenario import provenance

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

WIDTH = 140
"""Width of a table in characters."""


def with_latencies(records: Records) -> pyarrow.Table:
    """The requests of records as a table, with latencies, and with outcomes by name."""
    import pyarrow

    from headway.records.parquet import requests_table

    table, found, num = requests_table(records), sample(records, 0.0, None), len(records.workload["arrival_s"])
    ids = records.requests["request"].astype("i8")
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        values = np.full(num, np.nan)
        values[ids] = getattr(found, name)
        table = table.append_column(name, pyarrow.array(values, from_pandas=True))
    names = pyarrow.array([each.name.lower() for each in Outcome])
    codes = table["outcome"].combine_chunks().cast("int32")
    at = table.column_names.index("outcome")
    return table.set_column(at, "outcome", pyarrow.DictionaryArray.from_arrays(codes, names))


class Tabular:
    """Rows that other libraries can read, based on Arrow."""

    def to_arrow(self) -> pyarrow.Table:
        raise NotImplementedError

    def table(self) -> str:
        """The result as text, in the format of the command line."""
        raise NotImplementedError

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas frame. Raises HeadwayError if pandas is not installed."""
        try:
            return self.to_arrow().to_pandas()
        except ModuleNotFoundError:
            raise HeadwayError("to_pandas: pandas is not installed; pip install pandas") from None

    def to_polars(self) -> polars.DataFrame:
        """The rows as a Polars frame. Raises HeadwayError if Polars is not installed."""
        try:
            import polars
        except ModuleNotFoundError:
            raise HeadwayError("to_polars: polars is not installed; pip install polars") from None
        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame)
        return frame

    def _repr_html_(self) -> str:
        """The table that a notebook shows."""
        return f"<pre>{escape(self.table())}</pre>"


class Metrics(dict[str, "float | int | None"]):
    """Metrics by key. An unknown key raises an error with the nearest name."""

    def __missing__(self, key: str) -> float | int | None:
        raise unknown("metric", str(key), self)


@dataclass(frozen=True, repr=False)
class Result(Tabular):
    """One simulated run with its scenario, metrics and records."""

    scenario: Scenario
    run: Run

    @property
    def policies(self) -> dict[str, str]:
        """Policies by kind, such as {"routing": "least-loaded", "ordering": "fcfs"}."""
        return self.run.policies

    @property
    def summary(self) -> Summary:
        """The metrics as a structure, including tiers, models, regions and replicas."""
        return self.run.summary

    @property
    def metrics(self) -> Metrics:
        """All metrics by key, as in `--json`: `metrics["ttft_s.p99"]`. Raises HeadwayError for an unknown key."""
        return Metrics(flatten(self.run.summary))

    @property
    def records(self) -> Records:
        """Requests, segments, replicas and moves of the run."""
        return self.run.records

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions and omissions."""
        return self.run.notes

    def to_arrow(self) -> pyarrow.Table:
        """One row for each request: the workload's columns, the outcome, and the latencies.

        `ttft_s`, `tpot_s` and `e2e_s` are null if undefined, and `outcome` is a name, such as "finished".
        """
        return with_latencies(self.run.records)

    def table(self) -> str:
        return render([self.run], width=WIDTH)

    @checked
    def plot(self, metric: str = "ttft") -> Figure:
        """The cumulative distribution of `ttft`, `itl` or `e2e` over requests."""
        return _distribution([self.run], metric)

    def save(self, path: str | Path) -> Path:
        """Write the report to an .html file."""
        return _report([self.run], self.scenario, Path(path), None)

    def __repr__(self) -> str:
        return f"<headway.Result of {self.run.name}: {self.summary.num_requests:,} requests>"


@dataclass(frozen=True, repr=False)
class Comparison(Tabular, Sequence[Result]):
    """Several sets of policies on the same requests. `seeds`: the metrics of every run for every seed."""

    scenario: Scenario
    runs: tuple[Run, ...]
    """Runs with the first seed."""
    seeded: SeededMetrics

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        return list(self)[index]

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Result]:
        return (Result(each, run) for each, run in zip(variants(self.scenario), self.runs, strict=True))

    @property
    def names(self) -> list[str]:
        """Names of the runs, from the policies in which they differ."""
        named = [run.name for run in named_by_policies(self.runs)]
        if len(set(named)) == len(named):
            return named
        return [f"{i} {next(iter(run.policies.values()), run.name)}" for i, run in enumerate(self.runs, 1)]

    @property
    def verdict(self) -> str:
        """One sentence: which run has the lowest p99 TTFT, and whether others are tied with it."""
        return dots.verdict(self.names, self.seeded, "ttft_s.p99")

    @checked
    def estimate(self, run: int | str, metric: str) -> Estimate | None:
        """The mean of a metric over seeds and its 95% interval; None with one seed. `run`: a position or a name.

        Raises HeadwayError for an unknown run or metric.
        """
        self.seeded.check(metric)
        return self.seeded.estimate(self._position(run), metric)

    @checked
    def difference(self, run: int | str, other: int | str, metric: str) -> Estimate | None:
        """The metric of `run` minus the metric of `other`, seed by seed; otherwise like `estimate`."""
        self.seeded.check(metric)
        return self.seeded.difference(self._position(run), self._position(other), metric)

    def _position(self, run: int | str) -> int:
        if isinstance(run, int):
            if not 0 <= run < len(self.runs):
                raise HeadwayError(f"run: {run}; expected 0 to {len(self.runs) - 1}")
            return run
        if run not in self.names:
            raise unknown("run", run, self.names)
        return self.names.index(run)

    def to_arrow(self, breakdowns: bool = False) -> pyarrow.Table:
        """One row for each run and seed. `breakdowns`: include the metrics of tiers, models, regions and replicas."""
        rows = [
            {**run.policies, "seed": seed, **metrics}
            for run, by_seed in zip(self.runs, self.seeded.flat, strict=True)
            for seed, metrics in zip(self.seeded.seeds, by_seed, strict=True)
        ]
        return _arrow(rows, breakdowns)

    def table(self) -> str:
        return render(self.runs, width=WIDTH, seeded=self._several)

    @property
    def _several(self) -> SeededMetrics | None:
        return self.seeded if len(self.seeded.seeds) > 1 else None

    @checked
    def plot(self, *metrics: str) -> Figure:
        """Means and 95% intervals of each run. Default metrics: the p99 of TTFT, and dollars per million tokens.

        `ttft`, `itl` or `e2e` alone: the cumulative distributions with the first seed. Raises HeadwayError for an
        unknown metric.
        """
        if metrics in (("ttft",), ("itl",), ("e2e",)):
            return _distribution(self.runs, metrics[0])
        self.seeded.check(*metrics)
        return Figure(dots.figure(self.names, self.seeded, metrics or dots.KEYS))

    def save(self, path: str | Path) -> Path:
        """Write the report to an .html file."""
        return _report(self.runs, self.scenario, Path(path), self._several)

    def __repr__(self) -> str:
        return f"<headway.Comparison: {len(self.runs)} runs, {len(self.seeded.seeds)} seeds>"


@dataclass(frozen=True, repr=False)
class Sweep(Tabular):
    """The metrics of all combinations of some values, under each set of policies, for every seed."""

    grid: dict[str, tuple[Any, ...]]
    points: tuple[dict[str, Any], ...]
    """The values of each combination."""
    names: tuple[str, ...]
    """Names of the sets of policies."""
    seeded: tuple[SeededMetrics, ...]
    """Metrics by combination."""

    def to_arrow(self, breakdowns: bool = False) -> pyarrow.Table:
        """One row for each combination, set of policies and seed; `breakdowns` as in `Comparison.to_arrow`."""
        rows = [
            {**point, "policies": name, "seed": seed, **metrics}
            for point, seeded in zip(self.points, self.seeded, strict=True)
            for name, by_seed in zip(self.names, seeded.flat, strict=True)
            for seed, metrics in zip(seeded.seeds, by_seed, strict=True)
        ]
        return _arrow(rows, breakdowns)

    @checked
    def table(self, metric: str = "ttft_s.p99") -> str:
        """One line for each combination: a metric of each set of policies, with half of its interval.

        Raises HeadwayError for an unknown metric.
        """
        self._check(metric)
        heads = [*self.grid, *self.names]
        lines = [
            [*(str(value) for value in point.values()), *self._cells(i, metric)] for i, point in enumerate(self.points)
        ]
        widths = [max(len(row[i]) for row in [heads, *lines]) for i in range(len(heads))]
        shown = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *lines]
        ]
        return "\n".join([f"{metric}", *shown]) + "\n"

    def _check(self, metric: str) -> None:
        SeededMetrics((), tuple(by_seed for seeded in self.seeded for by_seed in seeded.flat)).check(metric)

    def _cells(self, point: int, metric: str) -> list[str]:
        return [dots.shown(self.seeded[point], run, metric) for run in range(len(self.names))]

    @checked
    def plot(self, metric: str = "ttft_s.p99", x: str | None = None) -> Figure:
        """A metric over one of the grid's keys, with bands of the 95% intervals: one line for each set of policies."""
        self._check(metric)
        x = x or next(iter(self.grid))
        if x not in self.grid:
            raise unknown("key of the grid", x, self.grid)
        others = [key for key in self.grid if key != x]
        lines: dict[str, list[tuple[Any, Estimate | float | None]]] = {}
        for point, seeded in zip(self.points, self.seeded, strict=True):
            suffix = "".join(f", {key} {point[key]}" for key in others)
            for run, name in enumerate(self.names):
                lines.setdefault(f"{name}{suffix}", []).append((point[x], dots.value(seeded, run, metric)))
        return Figure(dots.lines(lines, x, metric))

    def __repr__(self) -> str:
        return f"<headway.Sweep: {len(self.points)} combinations, {len(self.names)} sets of policies>"


def _arrow(rows: Sequence[Mapping[str, Any]], breakdowns: bool) -> pyarrow.Table:
    import pyarrow

    prefixes = tuple(f"{part}." for part in BREAKDOWNS.values())
    names = list(dict.fromkeys(name for row in rows for name in row))
    kept = [name for name in names if breakdowns or not name.startswith(prefixes)]
    return pyarrow.table({name: [row.get(name) for row in rows] for name in kept})


def _distribution(runs: Sequence[Run], metric: str) -> Figure:
    figures = charts.distributions(named_by_policies(runs))
    if metric not in figures:
        raise unknown("distribution", metric, figures or ("ttft", "itl", "e2e"))
    figure = figures[metric]
    return Figure(figure if len(runs) == 1 else {**figure, "layout": {**figure["layout"], **dots.legend(len(runs))}})


def _report(runs: Sequence[Run], scenario: Scenario, path: Path, seeded: SeededMetrics | None) -> Path:
    if path.suffix != ".html":
        raise HeadwayError(f"{path}: expected a name that ends in .html")
    html.write(runs, provenance(scenario), path, seeded)
    return path
