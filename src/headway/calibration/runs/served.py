"""Headway's own records, of `headway serve`, of `load --records` or of a simulation: one run for each replica.

A replica's run starts when its requests are placed on it, so that routing and holding are not predicted again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway import records
from headway.calibration.runs.run import MeasuredRun, RequestRows, run_of
from headway.core.errors import HeadwayError
from headway.core.record import NUM_SEQUENCES, Outcome, Records, ReplicaRecord

LEAST_REQUESTS = 20
"""Minimum number of requests of a replica; replicas with fewer are left out."""
NO_CACHE = "records do not tell what the engines' prefix caches held: every prompt counts as a new one"


def is_records(path: Path) -> bool:
    return path.is_dir() or path.name == "requests.parquet"


def read(path: Path) -> tuple[list[MeasuredRun], list[str], str]:
    """The runs, the skipped replicas with reasons, and the text of the fleet file ("" if unknown).

    Raises HeadwayError if the folder has no records, or no replica has enough requests.
    """
    folder = path if path.is_dir() else path.parent
    found, provenance = records.load(folder)
    runs, skipped = [], []
    for replica in found.replicas:
        where = f"{folder}: replica {replica.id} of {replica.pool}"
        rows, num_other = _rows(found, replica)
        if len(rows) < LEAST_REQUESTS:
            skipped.append(f"{where}: {len(rows)} whole streams; expected at least {LEAST_REQUESTS}")
            continue
        notes: tuple[str, ...] = (NO_CACHE,) if np.isnan(rows.cached_tokens).all() else ()
        if num_other:
            why = "moved, failed, were not streamed or had several sequences"
            notes += (f"{num_other} requests {why}, and are left out",)
        is_greedy = _is_greedy(provenance)
        runs.append(run_of(rows, where, replica.model, pool=replica.pool, is_greedy=is_greedy, notes=notes))
    if not runs:
        raise HeadwayError(f"{folder}: no run that can be used: {'; '.join(skipped) or 'no replica is recorded'}")
    text = next((provenance[key] for key in ("fleet", "scenario_yaml") if isinstance(provenance.get(key), str)), "")
    return runs, skipped, text


def _is_greedy(provenance: Mapping[str, Any]) -> bool | None:
    """Whether `headway load` sent greedy requests; None if other clients sent them."""
    load = provenance.get("load")
    return load.get("temperature") == 0 if isinstance(load, dict) else None


def _rows(found: Records, replica: ReplicaRecord) -> tuple[RequestRows, int]:
    """The requests that this replica alone answered, in a stream of one sequence; and the number of other requests that
    ended there."""
    requests: dict[str, Any] = dict(found.requests)
    own = requests["replica"] == replica.id
    first_s, end_s, placed_s = (requests[name] for name in ("first_token_s", "end_s", "placed_s"))
    tokens = requests["generated_tokens"]
    whole = own & (requests["outcome"] == Outcome.FINISHED) & (requests["attempts"] <= 1) & (requests["moves"] == 0)
    if NUM_SEQUENCES in requests:
        whole &= requests[NUM_SEQUENCES] <= 1
    whole &= (first_s > placed_s) & ((end_s > first_s) | (tokens <= 1))
    prompts = found.workload["prompt_tokens"][requests["request"][whole].astype("i8")]
    cached = requests["cached_prompt_tokens"][whole].astype("f8")
    if not cached.any():
        cached = np.full(len(cached), math.nan)
    columns = (placed_s[whole], prompts, tokens[whole], (first_s - placed_s)[whole], (end_s - placed_s)[whole], cached)
    rows = list(_tuples(columns))
    return RequestRows.of(rows), int(np.count_nonzero(own)) - len(rows)


def _tuples(columns: tuple[npt.NDArray[Any], ...]) -> Iterator[tuple[float, ...]]:
    return zip(*(column.astype("f8").tolist() for column in columns), strict=True)
