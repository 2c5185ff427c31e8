"""A forecast of demand as sentences and a table."""

from __future__ import annotations

from headway.forecast.demand import DemandForecast
from headway.forecast.demand_text import WEEK_HEADS, headlines, week_rows
from headway.report.blocks import Said, Table, table_of


def weeks(answer: DemandForecast) -> Table:
    return table_of(WEEK_HEADS, week_rows(answer))


def said(answer: DemandForecast) -> list[Said]:
    """The forecast for a console."""
    return [*headlines(answer), "", weeks(answer), "", *(f"assumed: {note}" for note in answer.assumptions)]
