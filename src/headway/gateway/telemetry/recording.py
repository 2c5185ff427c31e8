"""What ran, in the simulator's format: so that a served day can be simulated again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from headway.control.live import Live
from headway.control.recorder import Recorder
from headway.core.record import Columns, Records, ReplicaRecord
from headway.workload.table import LENGTH, QUALITY, Workload, default_of, dtype_of

Ints = npt.NDArray[np.int64]
_Pairs = tuple[tuple[str, float], ...]

_ROW = (
    ("arrival_s", "f8"), ("prompt_tokens", "i4"), ("output_tokens", "i4"), ("model", "i2"), ("tier", "i2"),
    ("reasoning_tokens", "i4"), ("region", "i2"), ("session_id", "i8"), ("slo_ttft_s", "f8"), ("slo_tpot_s", "f8"),
)  # fmt: skip


_MOST_REGIONS = 1 << 15


class Recording:
    """One run's. Without `keeps`, nothing is kept, and memory does not grow."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.recorder = Recorder()
        self._rows: list[tuple[int, tuple[float, ...]]] = []
        self._known: dict[int, tuple[_Pairs, _Pairs]] = {}
        """Of requests of a cascade: the scores of answers, and how long each was, by model."""
        self._models: dict[str, int] = {}
        self._regions: dict[str, int] = {}
        if not keeps:
            self.recorder.requests.write = self.recorder.segments.write = _forget

    @property
    def num_requests(self) -> int:
        """Requests that have ended."""
        return len(self._rows)

    def ended(self, live: Live, cascade: str = "") -> None:
        """A request has: what it would be as a workload's row. `cascade`: what it had asked for, if not a model."""
        if not self.keeps:
            return
        if cascade:
            self._known[live.id] = (live.quality, live.lengths)
        nan = float("nan")
        output_tokens = max(live.generated_tokens, 1)
        model = self._models.setdefault(cascade or live.model, len(self._models))
        self._rows.append((live.id, (
            live.arrival_s, live.prompt_tokens, output_tokens, model, live.tier,
            min(live.reasoning_tokens, output_tokens),
            self._region(live.region),
            -1 if live.session_id is None else live.session_id,
            nan if live.slo_ttft_s is None else live.slo_ttft_s, nan if live.slo_tpot_s is None else live.slo_tpot_s,
        )))  # fmt: skip

    def _region(self, name: str) -> int:
        """Its number. Clients name regions, and numbers are few: those that come after the last go without a name."""
        if len(self._regions) >= _MOST_REGIONS - 1 and name not in self._regions:
            name = ""
        return self._regions.setdefault(name, len(self._regions))

    def records(self, replicas: Iterable[ReplicaRecord], end_s: float, judge_usd: float = 0.0) -> Records:
        """All that has ended, with requests numbered in order of arrival, and time from the first of them."""
        self._rows.sort()
        table = np.array([row for _, row in self._rows], dtype=np.dtype(list(_ROW)))
        first_s = float(table["arrival_s"][0]) if len(table) else 0.0
        columns = {name: np.ascontiguousarray(table[name]) for name, _ in _ROW}
        columns["arrival_s"] = columns["arrival_s"] - first_s
        ids = np.array([id for id, _ in self._rows], dtype=np.int64)
        columns |= self._cascades(ids)
        workload = Workload(columns, tuple(self._models), tuple(self._regions)).validate()
        ended = self.recorder.requests.columns()
        segments = self.recorder.segments.columns()
        here = np.isin(segments["request"], ids)
        segments = {name: column[here] for name, column in segments.items()}
        for table_columns in (ended, segments):
            table_columns["request"] = np.searchsorted(ids, table_columns["request"].astype(np.int64))
            for name in table_columns:
                if name.endswith("_s"):
                    table_columns[name] = table_columns[name].astype(np.float64) - first_s
        return Records(
            workload=workload.columns, models=workload.models, regions=workload.regions, requests=ended,
            segments=segments, stretches=self.recorder.stretch_columns(),
            replicas=tuple(replicas), end_s=end_s - first_s,
            moves=self.recorder.moves.columns(), judge_usd=judge_usd,
        )  # fmt: skip

    def _cascades(self, ids: Ints) -> Columns:
        """`quality:MODEL` and `output_tokens:MODEL`: what is known of each model's answers."""
        made: dict[str, Any] = {}
        for id, known in self._known.items():
            row = int(np.searchsorted(ids, id))
            for start, pairs in zip((QUALITY, LENGTH), known, strict=True):
                for model, value in pairs:
                    name = start + model
                    if name not in made:
                        made[name] = np.full(len(ids), default_of(name), dtype=dtype_of(name))
                    made[name][row] = value
        return made


def _forget(row: Iterable[SupportsIndex]) -> None:
    pass
