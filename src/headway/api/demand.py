"""Forecasts of demand from recorded days. Plans accept them; they convert to tables and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.api.arguments import checked
from headway.api.figures import Figure
from headway.api.results import Tabular
from headway.core.errors import HeadwayError
from headway.forecast import demand, demand_file
from headway.forecast.demand import DemandForecast
from headway.forecast.demand_text import headlines
from headway.report.blocks import Lines
from headway.report.charts import layout
from headway.report.demand import said, weeks
from headway.report.page import COLORS
from headway.report.render import fragment, text

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, repr=False)
class Demand(Tabular):
    """The requests of the coming weeks by hour. `answer` holds all values, as `--json` prints them."""

    answer: DemandForecast

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Assumptions in place of facts that the records lack."""
        return self.answer.assumptions

    def to_arrow(self) -> pyarrow.Table:
        """One row for each hour: its start, and requests per second at each quantile."""
        import pyarrow

        answer = self.answer
        columns = {"begins": [answer.hour(step) for step in range(answer.num_steps)]}
        rates = {
            f"p{100 * q:g}_requests_per_s": list(row)
            for q, row in zip(answer.quantiles, answer.total.requests_per_s, strict=True)
        }
        return pyarrow.table({**columns, **rates})

    def table(self) -> str:
        return text(said(self.answer))

    def plot(self) -> Figure:
        """Requests per second by hour: the median, and the band from the 10% to the 90% quantile."""
        hours = [self.answer.hour(step) for step in range(self.answer.num_steps)]
        low, median, high = (self.answer.rates(q) for q in (0.1, 0.5, 0.9))
        line = {"type": "scatter", "mode": "lines", "x": hours}
        hidden = {**line, "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        return Figure(
            {
                "data": [
                    {**hidden, "y": low},
                    {**hidden, "y": high, "fill": "tonexty"},
                    {**line, "y": median, "line": {"color": COLORS[0]}, "name": "median"},
                ],
                "layout": layout("", "requests/s", 360),
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write a .parquet file for `headway plan ... --demand`."""
        demand_file.save(self.answer, Path(path))
        return Path(path)

    def _repr_html_(self) -> str:
        return fragment([Lines(headlines(self.answer)), weeks(self.answer), Lines(self.assumptions, "quiet")])

    def __repr__(self) -> str:
        return f"<headway.Demand: {self.answer.num_steps} hours from {self.answer.begins}>"


@checked
def forecast_demand(
    days: Sequence[str | Path] | str | Path,
    *,
    growth: float = 1.0,
    months: float = 1.0,
    time_zone: str = "UTC",
    begins: str | None = None,
    first: str | None = None,
    methods: Sequence[str] = demand.METHODS,
    assumed_spread: float = demand.SPREAD,
) -> Demand:
    """Forecast the requests of the coming weeks by hour, with quantiles, from recorded days: `headway forecast demand`.

    `days`: folders of records, or files of requests in any trace format; one, or a list. `growth`: the factor of demand
    from one month to the next. `begins`: when the first day began, if its records do not contain it. `first`: the first
    hour to forecast. `assumed_spread`: of demand from day to day, if only one day is known.
    """
    if isinstance(days, str | Path):
        days = [days]
    if not isinstance(days, Sequence) or not all(isinstance(day, str | Path) for day in days):
        raise HeadwayError(f"days: {days!r}; expected paths of recorded days")
    return Demand(
        demand.forecast_days(
            days,
            growth_per_month=growth,
            months=months,
            time_zone=time_zone,
            begins=begins,
            first=first,
            methods=methods,
            assumed_spread=assumed_spread,
        )
    )
