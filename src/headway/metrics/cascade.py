"""Quality of a cascade's answers, and the cost of judging them."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from headway.core.record import Cause, Outcome, Records
from headway.metrics.columns import Integers, floats, ints
from headway.metrics.latency import Sample

QUALITY = "quality:"


class AnswerMetrics(Struct, frozen=True):
    quality: float | None
    """Mean score of the answers, 0 to 100, from the workload's scores; None without scores."""
    judged: int
    """Number of answers that a judge scored."""
    judge_usd: float


def answer_metrics(records: Records, chosen: Sample) -> AnswerMetrics:
    finished = chosen.finished
    ids = chosen.id[finished]
    judged = _judged(records, ids)
    return AnswerMetrics(_quality(records, ids, chosen.column("replica")[finished]), judged, judged * records.judge_usd)


def _quality(records: Records, ids: Integers, replicas: Integers) -> float | None:
    """Mean score by the last model that served each request."""
    if not any(name.startswith(QUALITY) for name in records.workload):
        return None
    values = np.full(len(ids), np.nan)
    for model in {replica.model for replica in records.replicas if QUALITY + replica.model in records.workload}:
        served = np.isin(replicas, [replica.id for replica in records.replicas if replica.model == model])
        values[served] = floats(records.workload, QUALITY + model)[ids[served]]
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _judged(records: Records, ids: Integers) -> int:
    """Number of answers to these requests, without answers of last stages, which are not judged."""
    segments, requests = records.segments, records.requests
    if not len(requests["stage"]) or int(requests["stage"].max()) < 0:
        return 0
    counted = np.zeros(len(records.workload["arrival_s"]), dtype=np.bool_)
    counted[ids] = True
    answered = (segments["cause"] == Cause.FINISHED) & (ints(segments, "stage") >= 0) & counted[segments["request"]]
    ended = (requests["outcome"] == Outcome.FINISHED) & (ints(requests, "stage") >= 0) & counted[requests["request"]]
    return int(answered.sum() - (ended & np.isnan(floats(requests, "score"))).sum())
