"""Records of a served run in the simulator's format, so that a served day can be simulated again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.control.live import Live
from headway.control.recorder import Recorder
from headway.core.record import Columns, Records, ReplicaRecord
from headway.workload.table import LENGTH, QUALITY, Workload, default_of, dtype_of

Ints = npt.NDArray[np.int64]
_ByModel = tuple[tuple[str, float], ...]

_ROW = (
    ("arrival_s", "f8"), ("prompt_tokens", "i4"), ("output_tokens", "i4"), ("model", "i2"), ("tier", "i2"),
    ("reasoning_tokens", "i4"), ("region", "i2"), ("session_id", "i8"), ("slo_ttft_s", "f8"), ("slo_tpot_s", "f8"),
    ("tenant", "i2"),
)  # fmt: skip
_MAX_REGIONS = 1 << 15


class Recording:
    """The requests of one run as rows of a workload. If disabled, it keeps nothing, and memory does not grow."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.recorder = Recorder()
        self._rows: list[tuple[int, tuple[float, ...]]] = []
        self._cascade_answers: dict[int, tuple[_ByModel, _ByModel]] = {}
        """Each cascade request's scores and answer lengths, by model."""
        self._models: dict[str, int] = {}
        self._regions: dict[str, int] = {}
        self._tenants: dict[str, int] = {}
        if not enabled:
            self.recorder.requests.write = self.recorder.segments.write = lambda row: None

    @property
    def num_requests(self) -> int:
        return len(self._rows)

    def add(self, live: Live, cascade: str = "") -> None:
        """Add a request that has ended. `cascade`: the cascade that it asked for, if it did not ask for a model."""
        if not self.enabled:
            return
        if cascade:
            self._cascade_answers[live.id] = (live.quality, live.lengths)
        nan = float("nan")
        output_tokens = max(live.generated_tokens, 1)
        model = self._models.setdefault(cascade or live.model, len(self._models))
        self._rows.append((live.id, (
            live.arrival_s, live.prompt_tokens, output_tokens, model, live.tier,
            min(live.reasoning_tokens, output_tokens),
            self._region(live.region),
            -1 if live.session_id is None else live.session_id,
            nan if live.slo_ttft_s is None else live.slo_ttft_s, nan if live.slo_tpot_s is None else live.slo_tpot_s,
            self._tenants.setdefault(live.tenant, len(self._tenants)),
        )))  # fmt: skip

    def _region(self, name: str) -> int:
        """The region's number. Clients name regions, so those beyond the number's range are recorded without a name."""
        if len(self._regions) >= _MAX_REGIONS - 1 and name not in self._regions:
            name = ""
        return self._regions.setdefault(name, len(self._regions))

    def records(self, replicas: Iterable[ReplicaRecord], end_s: float, judge_usd: float = 0.0) -> Records:
        """All requests that have ended, numbered in order of arrival; time starts with the first of them."""
        self._rows.sort()
        table = np.array([row for _, row in self._rows], dtype=np.dtype(list(_ROW)))
        first_s = float(table["arrival_s"][0]) if len(table) else 0.0
        columns = {name: np.ascontiguousarray(table[name]) for name, _ in _ROW}
        columns["arrival_s"] = columns["arrival_s"] - first_s
        ids = np.array([id for id, _ in self._rows], dtype=np.int64)
        columns |= self._cascade_columns(ids)
        if not any(self._tenants):
            del columns["tenant"]
        tenants = tuple(self._tenants) if "tenant" in columns else ()
        workload = Workload(columns, tuple(self._models), tuple(self._regions), tenants=tenants).validate()
        requests = self.recorder.requests.columns()
        segments = self.recorder.segments.columns()
        has_ended = np.isin(segments["request"], ids)
        segments = {name: column[has_ended] for name, column in segments.items()}
        for rows in (requests, segments):
            rows["request"] = np.searchsorted(ids, rows["request"].astype(np.int64))
            for name in rows:
                if name.endswith("_s"):
                    rows[name] = rows[name].astype(np.float64) - first_s
        return Records(
            workload=workload.columns, models=workload.models, regions=workload.regions, requests=requests,
            tenants=workload.tenants,
            segments=segments, stretches=self.recorder.stretch_columns(),
            replicas=tuple(replicas), end_s=end_s - first_s,
            moves=self.recorder.moves.columns(), judge_usd=judge_usd,
        )  # fmt: skip

    def _cascade_columns(self, ids: Ints) -> Columns:
        """`quality:MODEL` and `output_tokens:MODEL`, from the answers of each model."""
        columns: dict[str, Any] = {}
        for id, answers in self._cascade_answers.items():
            row = int(np.searchsorted(ids, id))
            for prefix, by_model in zip((QUALITY, LENGTH), answers, strict=True):
                for model, value in by_model:
                    name = prefix + model
                    if name not in columns:
                        columns[name] = np.full(len(ids), default_of(name), dtype=dtype_of(name))
                    columns[name][row] = value
        return columns
