"""Recorded days, and their parts on which changes are chosen and judged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, nextafter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, structs

from headway import records
from headway.core.errors import HeadwayError
from headway.core.record import Columns, Records
from headway.metrics.columns import floats
from headway.metrics.latency import distribution, sample
from headway.records.folder import BEGAN_S
from headway.workload.readers.run_parts import is_under_way
from headway.workload.readers.shared import trace_file

LEAST_REQUESTS = 100
"""Minimum number of requests of a part: with fewer, one request is a whole point of SLO attainment."""
LEAST_JUDGED = 4
"""Minimum number of parts to judge on, if the days have enough requests."""
PARTS_OF_ONE_DAY = 7
MOST_PARTS = 16
"""Maximum number of parts, of one day or of all days together, spread evenly."""
LEAD = 3.0
"""Lead and tail of a part, in multiples of the p99 of E2E. Requests in the lead and tail run but do not count."""
LEAST_SCALED_S = 3600.0
"""Minimum length of a part for a fleet that scales: replicas take minutes to start and each part starts empty, so a
shorter part does not show the effect of scalers."""


@dataclass(frozen=True)
class Day:
    """One recorded day: the requests, and the fleet file that served them."""

    name: str
    folder: Path
    records: Records
    fleet_text: str
    """The fleet file or scenario that ran; empty if the records do not contain it."""
    began_s: float

    @property
    def num_requests(self) -> int:
        return len(self.records.workload["arrival_s"])

    def without_models(self, names: Collection[str]) -> Day:
        """The day without the requests for the models `names`. Raises HeadwayError if it has none."""
        codes = [code for code, name in enumerate(self.records.models) if name in names]
        if not codes or "model" not in self.records.workload:
            return self
        is_kept = ~np.isin(self.records.workload["model"], codes)
        if not is_kept.any():
            raise HeadwayError(f"{self.folder}: all requests are for {', '.join(names)}, which cannot be simulated")
        return replace(self, records=_of_rows(self.records, is_kept))


def _of_rows(all_rows: Records, is_kept: npt.NDArray[np.bool_]) -> Records:
    """The records of some rows of the workload, numbered again."""
    numbers = np.cumsum(is_kept) - 1

    def of_kept(rows: Columns) -> Columns:
        kept = is_kept[rows["request"]]
        found = {name: column[kept] for name, column in rows.items()}
        return {**found, "request": numbers[found["request"]].astype(rows["request"].dtype)}

    ids = all_rows.request_ids
    return structs.replace(
        all_rows,
        workload={name: column[is_kept] for name, column in all_rows.workload.items()},
        requests=of_kept(all_rows.requests),
        segments=of_kept(all_rows.segments),
        request_ids=None if ids is None else ids.filter(pa.array(is_kept)),
    )


class Part(Struct, frozen=True):
    """The requests of a day, or the requests that arrived in a part of it."""

    day: str
    folder: str
    from_s: float
    to_s: float | None
    """End of the part; None: the end of the day."""
    is_whole: bool
    num_requests: int
    lead_s: float = 0.0
    """Time before `from_s` that fills the empty fleet. Its requests do not count."""
    tail_s: float = 0.0
    """Time after `to_s` whose requests are served but not counted, so that the last counted requests do not run
    alone."""

    @property
    def name(self) -> str:
        if self.is_whole:
            return self.day
        return f"{self.day} {_clock(self.from_s)}-{'end' if self.to_s is None else _clock(self.to_s)}"

    @property
    def suits_scaling(self) -> bool:
        return self.is_whole or (self.to_s is not None and self.to_s - self.from_s >= LEAST_SCALED_S)

    @property
    def until_s(self) -> float:
        """End of the counted arrivals in a rehearsal."""
        return inf if self.to_s is None else nextafter(self.lead_s + self.to_s - self.from_s, 0.0)

    def document(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """A fleet's document with these requests as its workload."""
        trace: dict[str, Any] = {"path": self.folder}
        if not self.is_whole:
            trace |= {"from_s": self.from_s - self.lead_s} | (
                {} if self.to_s is None else {"to_s": self.to_s + self.tail_s}
            )
        workload = document.get("workload")
        sampling = {key: workload[key] for key in ("sampling",) if isinstance(workload, dict) and key in workload}
        made = {**document, "workload": {"trace": trace, **sampling}}
        if not self.is_whole:
            made["simulation"] = {**(document.get("simulation") or {}), "warmup_s": self.lead_s}
        return made


class Split(Struct, frozen=True):
    """Disjoint parts, by their use."""

    chosen_on: tuple[Part, ...]
    judged_on: tuple[Part, ...]
    by_day: bool
    """Whether the judged parts belong to days that were not used for choosing."""
    notes: tuple[str, ...]


def read(folders: Sequence[Path]) -> list[Day]:
    """The days in folders of records, in the order in which they ran. Raises HeadwayError for a folder without
    requests."""
    days = []
    for folder in folders:
        if not is_under_way(folder):
            trace_file(folder)  # raises for a folder without records
        found, provenance = records.load(folder)
        if not len(found.workload["arrival_s"]):
            raise HeadwayError(f"{folder}: the records have no requests")
        texts = (provenance.get(key) for key in ("fleet", "scenario_yaml"))
        text = next((each for each in texts if isinstance(each, str)), "")
        began_s = provenance.get(BEGAN_S)
        began_s = float(began_s) if isinstance(began_s, int | float) else 0.0
        days.append(Day(folder.name or str(folder), folder.absolute(), found, text, began_s))
    if len({day.folder for day in days}) < len(days):
        raise HeadwayError("--records: a day is given twice; expected each once")
    if len({day.name for day in days}) < len(days):
        days = [Day(str(each.folder), each.folder, each.records, each.fleet_text, each.began_s) for each in days]
    return sorted(days, key=lambda day: day.began_s)


def split(days: Sequence[Day], most_requests: int, is_scaled: bool = False) -> Split:
    """Parts to choose on and to judge on: alternating days, or alternating parts of a single day.

    Days with more than `most_requests` are cut into parts with equally many requests, and so are few days of a fleet
    that does not scale. Raises HeadwayError if there are too few requests.
    """
    if len(days) == 1:
        return _of_one_day(days[0], most_requests)
    judged, chosen = days[0::2], days[1::2]
    least = 1 if is_scaled and len(judged) > 1 else ceil(LEAST_JUDGED / len(judged))
    most = max(MOST_PARTS // len(days), least)
    parts = [[each for day in some for each in parts_of(day, most_requests, least, most)] for some in (chosen, judged)]
    if len(parts[1]) < 2:
        raise HeadwayError(f"{judged[0].folder}: {judged[0].num_requests} requests; expected {2 * LEAST_REQUESTS}")
    return Split(tuple(parts[0]), tuple(parts[1]), True, tuple(_cuts(days, [*parts[0], *parts[1]])))


def _of_one_day(day: Day, most_requests: int) -> Split:
    parts = parts_of(day, most_requests, PARTS_OF_ONE_DAY, MOST_PARTS)
    if len(parts) < 3:
        expected = 3 * LEAST_REQUESTS
        raise HeadwayError(f"{day.folder}: one day of {day.num_requests} requests; expected {expected}, or more days")
    note = "one day is given: what holds for its parts may not hold on other days"
    return Split(tuple(parts[1::2]), tuple(parts[0::2]), False, (note, *_cuts([day], parts)))


def _cuts(days: Sequence[Day], parts: Sequence[Part]) -> list[str]:
    """A note if not all requests are rehearsed."""
    used, every = sum(part.num_requests for part in parts), sum(day.num_requests for day in days)
    return [] if used == every else [f"{len(parts)} parts with {used:,} of {every:,} requests are rehearsed"]


def parts_of(day: Day, most_requests: int, least: int, most: int) -> list[Part]:
    """At least `least` parts if the day has enough requests, and at most `most`; otherwise the whole day."""
    arrival_s, num = np.sort(floats(day.records.workload, "arrival_s")), day.num_requests
    wanted = max(min(max(ceil(num / most_requests), least), num // LEAST_REQUESTS), 1)
    if wanted == 1:
        return [Part(day.name, str(day.folder), 0.0, None, True, num)]
    at = [round(i * num / wanted) for i in range(wanted)]
    edges = [0.0, *(float(arrival_s[i]) for i in at[1:]), nextafter(float(arrival_s[-1]), inf)]
    lead_s, made = LEAD * _e2e_p99_s(day.records), []
    for i in range(wanted):
        inside = int(np.count_nonzero((arrival_s >= edges[i]) & (arrival_s < edges[i + 1])))
        if inside:
            wide = edges[i + 1] - edges[i]
            beside = min(lead_s, wide, edges[i]), min(lead_s, wide, edges[-1] - edges[i + 1])
            made.append(Part(day.name, str(day.folder), edges[i], edges[i + 1], False, inside, *beside))
    if len(made) <= most:
        return made
    return [made[round(i * (len(made) - 1) / (most - 1))] for i in range(most)]


def _e2e_p99_s(found: Records) -> float:
    e2e_s = distribution(sample(found, 0.0, None).e2e_s)
    return 0.0 if e2e_s is None else e2e_s.p99


def _clock(time_s: float) -> str:
    minutes, seconds = divmod(round(time_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
