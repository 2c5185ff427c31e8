"""What answers are worth, and what judging them costs."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from headway.core.record import Cause, Outcome, Records
from headway.metrics.columns import Whole, floats, ints
from headway.metrics.latency import Sample

QUALITY = "quality:"


class Answers(Struct, frozen=True):
    """Of the requests that finished."""

    quality: float | None
    """Mean of what the answers are worth by the workload's scores, 0 to 100; None: it has none for them."""
    judged: int
    """Answers that a judge was asked about."""
    judge_usd: float


def answers(records: Records, chosen: Sample) -> Answers:
    """Over the requests that count."""
    finished = chosen.finished
    ids = chosen.id[finished]
    judged = _judged(records, ids)
    return Answers(_quality(records, ids, chosen.replica[finished]), judged, judged * records.judge_usd)


def _quality(records: Records, ids: Whole, replicas: Whole) -> float | None:
    """By the model that each was last with."""
    if not any(name.startswith(QUALITY) for name in records.workload):
        return None
    values = np.full(len(ids), np.nan)
    for model in {replica.model for replica in records.replicas if QUALITY + replica.model in records.workload}:
        here = np.isin(replicas, [replica.id for replica in records.replicas if replica.model == model])
        values[here] = floats(records.workload, QUALITY + model)[ids[here]]
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _judged(records: Records, ids: Whole) -> int:
    """Answers of these requests that were given, less those of last stages, which nobody judges."""
    segments, requests = records.segments, records.requests
    if not len(requests["stage"]) or int(requests["stage"].max()) < 0:
        return 0
    counted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    counted[ids] = True
    given = (segments["cause"] == Cause.FINISHED) & (ints(segments, "stage") >= 0) & counted[segments["request"]]
    ended = (requests["outcome"] == Outcome.FINISHED) & (ints(requests, "stage") >= 0) & counted[requests["request"]]
    return int(given.sum() - (ended & np.isnan(floats(requests, "score"))).sum())
