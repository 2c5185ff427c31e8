"""The requests of a fleet plan: by model, and redrawn for other seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.core.errors import HeadwayError, unknown
from headway.core.fleet import Model
from headway.workload.arrivals import Replay
from headway.workload.files import to_parquet
from headway.workload.generate import generate
from headway.workload.random_streams import stream
from headway.workload.spec import WorkloadSpec, resolved
from headway.workload.table import Workload
from headway.workload.transform import arriving_at

SHORTEST_S, LONGEST_S = 1.0, 60.0
PER_WINDOW = 20
"""Mean number of requests in a window in which arrivals are redrawn. A window lasts `SHORTEST_S` to `LONGEST_S`."""


@dataclass(frozen=True)
class FleetRequests:
    """A scenario's requests in files that simulations read."""

    spec: WorkloadSpec
    base_dir: Path
    seed: int
    names: Mapping[str, str]
    """The requested model names, and the planned model of each."""
    folder: Path
    _files: dict[tuple[int, str | None], Path] = field(default_factory=dict, init=False)

    def table(self, i: int = 0) -> Workload:
        """The original requests, or redrawn requests for a positive `i`.

        A synthetic workload is generated with the next seeds. For a trace, arrivals are redrawn within windows of about
        `PER_WINDOW` requests, which keeps its load over time. Requests without shared prefixes also change places.
        """
        is_recorded = self.spec.trace is not None or isinstance(self.spec.arrivals, Replay)
        rows = generate(self.spec, self.seed if is_recorded else self.seed + i, self.base_dir)
        rows = _named(rows, self.names)
        return redrawn(rows, self.seed + i) if is_recorded and i else rows

    def file(self, i: int = 0, model: str | None = None) -> Path:
        """A Parquet file of the requests, or of one model's requests."""
        if (i, model) not in self._files:
            self._files[i, model] = self._written(i, model)
        return self._files[i, model]

    def _written(self, i: int, model: str | None) -> Path:
        rows = self.table(i)
        if model is not None:
            code = rows.models.index(model)
            rows = rows.take(np.asarray(rows.columns["model"] == code))
        path = self.folder / f"{_digest(rows)}.parquet"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            to_parquet(rows, path)
        return path


def check_workload(spec: WorkloadSpec) -> WorkloadSpec:
    """The workload with its built-in parts. Raises HeadwayError if clients react to answers."""
    full = resolved(spec)
    if full.reacts:
        raise HeadwayError(
            "workload: a fleet is planned for recorded or drawn arrivals; expected no sessions, agents or concurrency"
        )
    return full


def names_of(spec: WorkloadSpec, seed: int, base_dir: Path, models: Sequence[Model]) -> dict[str, str]:
    """The requested model names, and the planned model of each. Raises HeadwayError if a requested model is not
    planned."""
    rows = generate(spec, seed, base_dir)
    if not len(rows):
        raise HeadwayError("workload: there are no requests")
    if "model" not in rows.columns:
        if len(models) > 1:
            what = f"requests name no model, and there are {len(models)}"
            raise HeadwayError(f"workload: {what}; expected a column `model`, or one model")
        return {"": models[0].name}
    found: dict[str, str] = {}
    for name in rows.models:
        model = next((each for each in models if name in each.names), None)
        if model is None:
            raise unknown("model", name, [each.name for each in models], "workload: requests ask for")
        found[name] = model.name
    return found


def redrawn(rows: Workload, seed: int) -> Workload:
    """The requests with arrival times redrawn uniformly within windows."""
    span_s = float(rows.arrival_s[-1] - rows.arrival_s[0]) if len(rows) > 1 else 0.0
    if span_s <= 0:
        return rows
    window_s = min(max(PER_WINDOW * span_s / len(rows), SHORTEST_S), LONGEST_S)
    window = np.floor((rows.arrival_s - rows.arrival_s[0]) / window_s)
    random = stream(seed, "arrivals drawn anew")
    arrival_s = rows.arrival_s[0] + np.minimum((window + random.random(len(rows))) * window_s, span_s)
    if rows.prefix is None and "session_id" not in rows.columns:
        return arriving_at(rows, arrival_s).sorted()
    return arriving_at(rows, np.sort(arrival_s))


def _named(rows: Workload, names: Mapping[str, str]) -> Workload:
    """The rows with the planned models' names."""
    models = tuple(dict.fromkeys(names.values()))
    if "model" not in rows.columns:
        codes = np.zeros(len(rows), "i2")
    else:
        code_of = np.array([models.index(names[name]) for name in rows.models], "i2")
        codes = code_of[rows.columns["model"].astype("i8")]
    return Workload({**rows.columns, "model": codes}, models, rows.regions, rows.prefix, rows.notes, rows.tenants)


def _digest(rows: Workload) -> str:
    digest = hashlib.sha256(repr((rows.models, rows.regions, rows.tenants, sorted(rows.columns))).encode())
    for name in sorted(rows.columns):
        digest.update(np.ascontiguousarray(rows.columns[name]).tobytes())
    if rows.prefix is not None:
        for part in (rows.prefix.offsets, rows.prefix.ids, rows.prefix.tokens):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:24]
