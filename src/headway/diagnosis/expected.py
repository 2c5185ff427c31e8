"""Expected times of a request by a replica's step-time model, given the other requests there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.config import scenario, strict_yaml
from headway.config.fleet import coefficients_of
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.diagnosis.history import History
from headway.perf.expected_latency import Floats, itl_s, ttft_s
from headway.perf.speculation import AnyStepModel, step_model

_WORKLOAD = {"prompt_tokens": 1, "output_tokens": 1, "num_requests": 1, "arrivals": 1.0}
"""Stands in for the workload, which a fleet file does not have."""


class Expected(Struct, frozen=True):
    """Expected seconds; None if the replica's GPU is unknown, or if the replica had more requests than its engine runs
    at once."""

    first_token_s: float | None = None
    own_prompt_s: float | None = None
    """The part of the prompt time that an idle engine would need."""
    decode_s: float | None = None


class Predictions:
    """The step-time models of a fleet."""

    def __init__(self, history: History, fleet: Path | None) -> None:
        """`fleet`: the fleet file; None: the file stored in the records. Raises HeadwayError if the file is invalid."""
        self._history = history
        self.why_unknown = ""
        """Why there are no expectations for any request; empty if there are."""
        self.router = ""
        """The fleet's router in the notation of its file."""
        self._pools: dict[str, Pool] = {}
        self._coefficients: Mapping[str, Coefficients] = {}
        try:
            self._read(history, fleet)
        except HeadwayError as error:
            if fleet is not None:
                raise
            self.why_unknown = f"the fleet file in the records cannot be used ({error}); give it with --fleet"
        self._models: dict[str, AnyStepModel | None] = {}
        self._loads: dict[int, tuple[Floats, Any]] = {}

    def _read(self, history: History, fleet: Path | None) -> None:
        if fleet is not None:
            (document, places), base = scenario.read(fleet), fleet.parent
        elif history.fleet_text:
            document, places = strict_yaml.parse(history.fleet_text, f"{history.where}: its fleet file")
            document, base = {"name": "served", **document}, Path()
        else:
            self.why_unknown = "the records have no fleet file; give it with --fleet"
            return
        workload = document.get("workload")
        sampling: Mapping[str, Any] = workload if isinstance(workload, dict) else {}
        kept = {key: sampling[key] for key in ("sampling",) if key in sampling}
        chosen = scenario.assemble({**document, "workload": _WORKLOAD | kept}, places, base)
        self._pools = {pool.name: pool for pool in chosen.fleet.all_pools}
        self._coefficients = coefficients_of(chosen.spec, chosen.fleet, base, places, only_known=True)
        policies = document.get("policies")
        router = policies.get("routing") if isinstance(policies, dict) else None
        self.router = str(router.get("name", "") if isinstance(router, dict) else router or "")

    def pool(self, name: str) -> Pool | None:
        return self._pools.get(name)

    def _model(self, name: str) -> AnyStepModel | None:
        if name not in self._models:
            self._models[name] = self._made(self._pools.get(name))
        return self._models[name]

    def _made(self, pool: Pool | None) -> AnyStepModel | None:
        coefficients = None if pool is None else self._coefficients.get(pool.name)
        if pool is None or coefficients is None:
            return None
        try:
            return step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients)
        except HeadwayError as error:
            self.why_unknown = f"{pool.name}: {error}"
            return None

    def of(self, row: int, replica: int, from_s: float) -> Expected:
        """Expectations for a request's stay at a replica from `from_s` until its end."""
        record = self._history.replicas.get(replica)
        model = None if record is None else self._model(record.pool)
        if record is None or model is None:
            return Expected()
        pool, history = self._pools[record.pool], self._history
        times, others = history.times(row), self._others(replica, row, from_s)
        prompt = max(
            history.arrived("prompt_tokens", row) - max(history.value("cached_prompt_tokens", row, 0.0), 0.0), 1
        )
        expected_s = ttft_s(from_s, prompt, others, pool, model)
        own_s = ttft_s(from_s, prompt, others[:0], pool, model)
        tokens, first_s = times.sequence_tokens, times.first_token_s
        if isnan(first_s):
            first_s = min(from_s + (expected_s or 0.0), times.end_s)
        decode_s = None
        if tokens > 1 and times.end_s > first_s:
            context = history.arrived("prompt_tokens", row) + tokens / 2
            each_s = itl_s(first_s, times.end_s, context, others, pool, model)
            decode_s = None if each_s is None else each_s * (tokens - 1)
        return Expected(expected_s, own_s, 0.0 if tokens <= 1 else decode_s)

    def _others(self, replica: int, row: int, from_s: float) -> Floats:
        """The other requests that were at the replica at the same time."""
        if replica not in self._loads:
            self._loads[replica] = self._load(replica)
        load, rows = self._loads[replica]
        end_s = self._history.times(row).end_s
        return np.asarray(load[(load[:, 0] < end_s) & (load[:, 2] > from_s) & (rows != row)])

    def _load(self, replica: int) -> tuple[Floats, Any]:
        """All stays at a replica and their requests. A stay with an unknown first token counts as decoding from its
        start."""
        history = self._history
        table: Mapping[str, Any] = history.records.requests
        at = np.flatnonzero((table["replica"] == replica) & ~np.isnan(table["placed_s"]))
        rows = table["request"][at].astype(np.int64)
        begun_s = self._last_stays.get(replica, {})
        from_s = np.array(
            [begun_s.get(row, placed) for row, placed in zip(rows.tolist(), table["placed_s"][at], strict=True)], "f8"
        )
        first_s = table["first_token_s"][at].astype("f8")
        prompts = history.records.workload["prompt_tokens"][rows]
        first_s = np.where(np.isnan(first_s), from_s, np.maximum(first_s, from_s))
        load = np.stack([from_s, first_s, table["end_s"][at], prompts, table["generated_tokens"][at]], 1, dtype="f8")
        return load, rows

    @cached_property
    def _last_stays(self) -> dict[int, dict[int, float]]:
        """Maps each replica and request to the start of the request's last stay there, if stays are recorded
        separately."""
        found: dict[int, dict[int, float]] = {}
        table: Mapping[str, Any] = self._history.records.segments
        columns = (table[name].tolist() for name in ("replica", "request", "enqueued_s"))
        for replica, request, enqueued_s in zip(*columns, strict=True):
            of_replica = found.setdefault(int(replica), {})
            of_replica[int(request)] = max(of_replica.get(int(request), enqueued_s), enqueued_s)
        return found
