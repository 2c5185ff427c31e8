"""The recorded data of a run's requests: the records with named columns, and the decision log."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headway import records
from headway.control.decisions import Decision
from headway.core.errors import HeadwayError
from headway.core.record import LONGEST_GAP, NUM_SEQUENCES, RESUMED, Cause, Ended, Outcome, Records, ReplicaRecord
from headway.diagnosis.terms import Stay, Times
from headway.records.folder import BEGAN_S

_NUM_NEAR = 5
_MOST_COMPARED = 20_000
"""The most recent ids, among which near ones are searched."""
_MOST_ENDED = 2_000
"""The most recent ended requests, from which a router learns."""
_SLACK_S = 1.0
"""Largest difference between the times of records and decisions."""
_ENDS = {Outcome.FINISHED: Cause.FINISHED, Outcome.CANCELLED: Cause.CANCELLED, Outcome.UNFINISHED: Cause.UNFINISHED}
Rows = npt.NDArray[np.int64]


class History:
    """The requests of a records folder. `row` is a request's row in `requests.parquet`."""

    def __init__(self, found: Records, provenance: dict[str, Any], where: str = "records") -> None:
        self.records, self.where = found, where
        began_s = provenance.get(BEGAN_S)
        self.began_s = float(began_s) if isinstance(began_s, int | float) else None
        """Wall-clock time of the records' time 0; None for a simulation, or for records of an older version."""
        texts = (provenance.get(key) for key in ("fleet", "scenario_yaml"))
        self.fleet_text = next((text for text in texts if isinstance(text, str)), "")
        self.replicas = {replica.id: replica for replica in found.replicas}
        ended: dict[str, Any] = found.requests
        self._row_of_ended = ended["request"].astype(np.int64)
        self._at = np.full(len(found.workload["arrival_s"]), -1, np.int64)
        self._at[self._row_of_ended] = np.arange(len(self._row_of_ended))

    @property
    def rows(self) -> Rows:
        """The requests that have ended."""
        return np.asarray(self._row_of_ended)

    def request_id(self, row: int) -> str:
        ids = self.records.request_ids
        return str(row) if ids is None else ids[row].as_py() or str(row)

    def rows_of(self, request_id: str) -> list[int]:
        """The rows with an id, by arrival, because a client may repeat an id. Raises HeadwayError if there are none."""
        ids = self.records.request_ids
        if ids is None:
            has_it = request_id.isdecimal() and int(request_id) < len(self._at)
            found = [int(request_id)] if has_it else []
        else:
            from pyarrow import compute

            found = compute.indices_nonzero(compute.equal(ids, request_id)).to_pylist()
        found = [row for row in found if self._at[row] >= 0]
        if not found:
            raise HeadwayError(self._unknown(request_id))
        return found

    def _unknown(self, request_id: str) -> str:
        ids = self.records.request_ids
        text = f"{self.where}: no request {request_id!r}"
        if ids is None:
            most = f"its requests have the numbers 0 to {len(self._at) - 1}"
            return f"{text}; these are the records of a simulation, or of an older version: {most}"
        near = nearest(request_id, ids[-_MOST_COMPARED:].to_pylist())
        hint = f"the nearest are {', '.join(near)}" if near else "no id is like it"
        missing = (
            "a request that was refused on arrival is in the access log only, one of the last seconds not yet here"
        )
        return f"{text}; {hint} ({missing})"

    def value(self, column: str, row: int, default: float = nan) -> float:
        """An outcome of the request."""
        values = self.records.requests.get(column)
        return default if values is None else float(values[self._at[row]])

    def arrived(self, column: str, row: int, default: float = 0) -> float:
        """A property of the request at its arrival."""
        values = self.records.workload.get(column)
        return default if values is None else float(values[row])

    def name(self, column: str, row: int) -> str:
        """A name of the request: its model, tenant, region or LoRA adapter; "" for none."""
        names = {
            "model": self.records.models,
            "tenant": self.records.tenants,
            "region": self.records.regions,
            "lora": self.records.loras,
        }[column]
        return names[int(self.arrived(column, row))] if names else ""

    def times(self, row: int) -> Times:
        gap_s = self.value(LONGEST_GAP, row, 0.0)
        return Times(
            self.arrived("arrival_s", row),
            self.value("first_token_s", row),
            self.value("end_s", row),
            int(self.value("generated_tokens", row)),
            0.0 if isnan(gap_s) else gap_s,
            max(int(self.value(NUM_SEQUENCES, row, 0)), 1),
        )

    def stays(self, row: int) -> list[Stay]:
        """The request's stays in order. A stay that is not recorded separately lasts from the placement to the end."""
        found = [self._stay(i, row) for i in self._segments_of(row)]
        if found:
            return sorted(found, key=lambda stay: (stay.from_s, stay.to_s))
        placed_s = self.value("placed_s", row)
        if isnan(placed_s):
            return []
        cause = _ENDS.get(Outcome(int(self.value("outcome", row))), Cause.FINISHED)
        admitted_s = self.value("admitted_s", row)
        return [Stay(int(self.value("replica", row)), placed_s, self.value("end_s", row), cause, admitted_s)]

    def _segments_of(self, row: int) -> list[int]:
        first, after = np.searchsorted(self._segment_rows[0], (row, row + 1))
        return [int(each) for each in self._segment_rows[1][first:after]]

    @cached_property
    def _segment_rows(self) -> tuple[Rows, Rows]:
        """The request of each segment, in ascending order, and the segment's position in the table."""
        requests: npt.NDArray[Any] = self.records.segments["request"]
        order = np.argsort(requests, kind="stable")
        return requests[order].astype(np.int64), order

    def _stay(self, i: int, row: int) -> Stay:
        table = self.records.segments
        enqueued_s, admitted_s, end_s = (float(table[name][i]) for name in ("enqueued_s", "admitted_s", "end_s"))
        is_simulated = len(self.records.stretches["replica"]) > 0
        resumed_s = float(table["prefill_end_s"][i]) if is_simulated else self.value(RESUMED, row)
        return Stay(
            int(table["replica"][i]),
            enqueued_s,
            end_s,
            Cause(int(table["cause"][i])),
            admitted_s if is_simulated else nan,
            resumed_s,
        )

    # Replicas.

    def replica_name(self, id: int) -> str:
        replica = self.replicas.get(id)
        return "" if replica is None else replica.name or f"{replica.pool}/{replica.id}"

    def logged_replica(self, row: int, number: int) -> ReplicaRecord | None:
        """The replica that had this number when the request was served. Each run of a gateway counts from 0."""
        replica = self.replicas.get(int(self.value("replica", row)))
        return self.replicas.get(number if replica is None else number + _base(replica))

    def ended_before(self, row: int, time_s: float) -> list[Ended]:
        """The last requests that had ended at a time, in order, with the replicas' numbers in the same run."""
        table: Mapping[str, Any] = self.records.requests
        until = int(np.searchsorted(table["end_s"], time_s))
        found = [self._ended(each) for each in self._row_of_ended[max(until - _MOST_ENDED, 0) : until].tolist()]
        own = self.replicas.get(int(self.value("replica", row)))
        base = 0 if own is None else _base(own)
        return [
            replace(each, replica=each.replica - base) for each in found if each.replica < 0 or each.replica >= base
        ]

    def _ended(self, row: int) -> Ended:
        times = self.times(row)
        ttft_s, tpot_s, e2e_s = (self.arrived(f"slo_{name}_s", row, nan) for name in ("ttft", "tpot", "e2e"))
        return Ended(
            row,
            Outcome(int(self.value("outcome", row))),
            self.name("model", row),
            tier=int(self.arrived("tier", row)),
            replica=int(self.value("replica", row)),
            arrival_s=times.arrival_s,
            first_token_s=_known(times.first_token_s),
            end_s=times.end_s,
            prompt_tokens=int(self.arrived("prompt_tokens", row)),
            generated_tokens=times.generated_tokens,
            slo_ttft_s=_known(ttft_s),
            slo_tpot_s=_known(tpot_s),
            slo_e2e_s=_known(e2e_s),
            tenant=self.name("tenant", row),
            num_sequences=times.num_sequences,
        )


def _base(replica: ReplicaRecord) -> int:
    """The number, in the records, of the replica that had number 0 in the same run."""
    return replica.id - int(replica.name.rpartition("/")[2]) if replica.name else 0


def _known(value: float) -> float | None:
    return None if isnan(value) else value


def read(folder: Path) -> History:
    """Read the requests of a records folder. Raises HeadwayError if it has none."""
    found, provenance = records.load(folder)
    return History(found, provenance, str(folder))


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """The most similar names: names with the same beginning, then names with small differences."""
    alike = [each for each in known if each and (each.startswith(name) or name.startswith(each))]
    if len(alike) < _NUM_NEAR:
        alike += difflib.get_close_matches(name, known, _NUM_NEAR)
    return list(dict.fromkeys(alike))[:_NUM_NEAR]


class DecisionLog:
    """The lines of a decision log about some requests, preceded by those of `FILE.1`."""

    def __init__(self, path: Path, requests: Collection[str]) -> None:
        """Raises HeadwayError for a missing file, or one that is not a decision log."""
        self._by_request: dict[str, list[Decision]] = {each: [] for each in requests}
        self.num_dropped = 0
        """Missing lines according to the log."""
        older = path.with_name(path.name + ".1")
        for each in ([older] if older.is_file() else []) + [path]:
            self._read(each)

    def _read(self, path: Path) -> None:
        wanted = [msgspec.json.encode(each) for each in self._by_request]
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    is_dropped = b'"what":"dropped"' in line
                    if is_dropped or (wanted and any(each in line for each in wanted)):
                        self._take(line, is_dropped, f"{path}: line {number}")
        except OSError as error:
            raise HeadwayError(f"{path}: cannot be read ({error.strerror})") from None

    def _take(self, line: bytes, is_dropped: bool, where: str) -> None:
        try:
            if is_dropped:
                self.num_dropped += int(msgspec.json.decode(line)["num"])
                return
            decision = msgspec.json.decode(line, type=Decision)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            if line.endswith(b"\n"):
                raise HeadwayError(f"{where}: not a line of a decision log ({error})") from None
            return  # the last line is still being written
        if decision.request in self._by_request:
            self._by_request[decision.request].append(decision)

    def of(self, request_id: str, from_s: float | None, to_s: float | None) -> Iterator[Decision]:
        """The decisions about a request between two times, in order; None: at any time."""
        for each in self._by_request[request_id]:
            is_after = from_s is None or each.time_s >= from_s - _SLACK_S
            if is_after and (to_s is None or each.time_s <= to_s + _SLACK_S):
                yield each
