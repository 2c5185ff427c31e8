"""Predicted over observed latencies of each replica: whether its step-time model still holds.

A request that ends is noted, no more. Every few seconds, the noted ones are compared with what the step-time model
says of the load that they met: the requests that were decoding beside them, and the prompts that were computed
meanwhile. The ratio of a replica is the median over its last requests, so that a few odd ones do not matter. Queueing
for a seat is not predicted: a request that met as many others as the engine runs counts for its time between tokens
only. Prompts count as new ones, as the gateway does not know what an engine's prefix cache holds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from statistics import median

import numpy as np
from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.control.live import Live
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf.expected_latency import Floats, Stay, itl_s, ttft_s
from headway.perf.speculation import AnyStepModel, step_model

COMPARISON_PERIOD_S = 5.0
"""Time between two comparisons."""
NUM_STAYS = 512
"""Requests of a replica that are remembered as the load that others met."""
NUM_COMPARED = 64
"""Requests of a replica in each comparison, at most, and in its median."""
LEAST_COMPARED = 16
"""A ratio of fewer requests is not reported."""
TOLERATED = 1.1
"""A larger factor between prediction and observation calls for a correction."""
LEAST_TOKENS = 8
"""Shorter answers do not show the time between tokens."""


class PredictionRatio(Struct, forbid_unknown_fields=True):
    """Predicted over observed latencies of a replica's last requests, medians. Below 1: it is slower than predicted."""

    ttft: float | None
    """Time to first token; null: too few requests that did not wait for a seat."""
    itl: float | None
    """Time between tokens; null: too few answers that were streamed."""
    correction: str | None
    """How to correct the predictions; null: they hold."""


class _Replica:
    """What is known of one replica's requests."""

    __slots__ = ("itl", "pool", "stays", "ttft", "waiting")

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.stays: deque[Stay] = deque(maxlen=NUM_STAYS)
        self.waiting: deque[Stay] = deque(maxlen=NUM_COMPARED)
        """To be compared."""
        self.ttft: deque[float] = deque(maxlen=NUM_COMPARED)
        """Logarithms of predicted over observed."""
        self.itl: deque[float] = deque(maxlen=NUM_COMPARED)


class PredictionDrift:
    """Compares the requests of replicas whose pool has a step-time model. Belongs to one event loop."""

    def __init__(self, served: Callable[[str], tuple[Pool | None, Coefficients | None]]) -> None:
        """`served` finds a pool by its name, with its step times; None: nothing is known of its GPU, and its requests
        are not compared."""
        self._served = served
        self._models: dict[str, tuple[Pool | None, AnyStepModel | None]] = {}
        self._replicas: dict[int, _Replica] = {}

    def add(self, replica: int, pool: str, live: Live, end_s: float) -> None:
        """Note a request that this replica alone has answered in a stream."""
        if not live.enqueued_s < live.first_token_s < end_s:
            return
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Replica(pool)
        stay = (live.enqueued_s, live.first_token_s, end_s, live.prompt_tokens, live.generated_tokens)
        known.stays.append(stay)
        known.waiting.append(stay)

    def compare(self, in_flight: Mapping[int, Iterable[Live]], now: float) -> None:
        """Compare the requests that were noted since the last call. `in_flight`: by replica, those that run."""
        for id, known in self._replicas.items():
            if not known.waiting:
                continue
            pool, model = self._model(known.pool)
            if model is None or pool is None:
                known.waiting.clear()
                continue
            running = [
                (live.enqueued_s, live.first_token_s, now, live.prompt_tokens, live.generated_tokens)
                for live in in_flight.get(id, ())
            ]
            load = np.array([*known.stays, *running], "f8")
            for stay in known.waiting:
                _compare(np.array(stay), load, pool, model, known)
            known.waiting.clear()

    def _model(self, name: str) -> tuple[Pool | None, AnyStepModel | None]:
        """A pool and its step-time model, made anew if the fleet's file has changed; None: there is none."""
        pool, coefficients = self._served(name)
        known = self._models.get(name)
        if known is not None and known[0] is pool:
            return known
        model = None
        if pool is not None and coefficients is not None:
            with suppress(HeadwayError):
                model = step_model(pool.model, pool.gpu, pool.engine, pool.parallel, coefficients)
        self._models[name] = pool, model
        return pool, model

    def forget(self, replica: int) -> None:
        """Forget a replica that is removed, or whose engine was started again."""
        self._replicas.pop(replica, None)

    def ratio(self, replica: int) -> PredictionRatio | None:
        """None: its requests are not compared, or too few were."""
        known = self._replicas.get(replica)
        if known is None:
            return None
        ttft, itl = _median(known.ttft), _median(known.itl)
        if ttft is None and itl is None:
            return None
        worst = max(abs(math.log(each)) for each in (ttft, itl) if each is not None)
        return PredictionRatio(ttft, itl, correction(known.pool) if worst > math.log(TOLERATED) else None)

    def gauges(self, replica: int) -> Iterator[tuple[str, float]]:
        """The known ratios by latency, for the metrics page."""
        ratio = self.ratio(replica)
        for name in ("ttft", "itl") if ratio is not None else ():
            if (value := getattr(ratio, name)) is not None:
                yield name, value


def correction(pool: str) -> str:
    """What a user can do about predictions of a pool that do not hold."""
    return (
        f"headway calibrate RECORDS --fleet FLEET.yaml --pool {pool} --out {pool}.json --source live, with the folder"
        f" of headway serve --records; then `coefficients: {pool}.json` in the pool"
    )


def _median(logs: deque[float]) -> float | None:
    return math.exp(median(logs)) if len(logs) >= LEAST_COMPARED else None


def _compare(stay: Floats, load: Floats, pool: Pool, model: AnyStepModel, known: _Replica) -> None:
    """Add the request's ratios to those of its replica."""
    placed_s, first_s, end_s, prompt, tokens = stay.tolist()
    others = load[(load[:, :3] != stay[:3]).any(axis=1)]
    gaps = tokens - 1
    if gaps >= LEAST_TOKENS:
        predicted_s = itl_s(first_s, end_s, prompt + tokens / 2, others, pool, model)
        if predicted_s is not None:
            known.itl.append(math.log(predicted_s * gaps / (end_s - first_s)))
    predicted_s = ttft_s(placed_s, prompt, others, pool, model)
    if predicted_s is not None:
        known.ttft.append(math.log(predicted_s / (first_s - placed_s)))
