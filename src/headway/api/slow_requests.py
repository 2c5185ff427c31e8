"""Explanations of slow requests, as printed by `headway why`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway import diagnosis
from headway.api.arguments import checked
from headway.api.results import Tabular
from headway.core.errors import HeadwayError
from headway.diagnosis.explain import Explanation
from headway.diagnosis.text import table, text

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True, repr=False)
class Why(Tabular):
    """Explanations of requests, slowest first."""

    requests: tuple[Explanation, ...]

    def to_arrow(self) -> pyarrow.Table:
        """One row for each request, with a column of seconds for each term."""
        import pyarrow

        rows = [
            {
                "request": each.request,
                "row": each.row,
                "model": each.model,
                "replica": each.replica,
                "outcome": each.outcome,
                "e2e_s": each.e2e_s,
                "ttft_s": each.ttft_s,
                "tpot_s": each.tpot_s,
                "biggest": each.biggest,
                "cause": each.cause,
                **{f"{term.term.replace(' ', '_')}_s": term.seconds for term in each.terms},
            }
            for each in self.requests
        ]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return pyarrow.table({name: [row.get(name) for row in rows] for name in columns})

    def table(self) -> str:
        return text(self.requests[0]) if len(self.requests) == 1 else table(self.requests)

    def __repr__(self) -> str:
        return self.table()


@checked
def why(
    records: str | Path,
    request: str | None = None,
    *,
    slowest: int | None = None,
    by: str = "e2e",
    decisions: str | Path | None = None,
    fleet: str | Path | None = None,
) -> Why:
    """Explain one request of a folder of records by its id, or the `slowest` ones by `e2e`, `ttft` or `tpot`.

    `decisions`: the decision log. `fleet`: the fleet file, if the records do not contain it. Raises HeadwayError for an
    unknown id, with the nearest ones.
    """
    if (request is None) == (slowest is None):
        raise HeadwayError("why: expected a request's id, or slowest=10")
    history = diagnosis.read(Path(records))
    log, file = (None if each is None else Path(each) for each in (decisions, fleet))
    if request is not None:
        return Why((diagnosis.explain(history, request, log, file),))
    assert slowest is not None
    return Why(tuple(diagnosis.slowest(history, slowest, by, log, file)))
