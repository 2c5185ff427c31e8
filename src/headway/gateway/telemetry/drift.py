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
import numpy.typing as npt
from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.control.live import Live
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
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
FULL = 0.9
"""Largest share of the time that may be due to prompts."""
Floats = npt.NDArray[np.float64]
Stay = tuple[float, float, float, float, float]
"""Placement, first token and end of a request at its replica, in seconds; prompt and output tokens."""


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
        itl_s = _itl_s(first_s, end_s, prompt + tokens / 2, gaps, others, pool, model)
        if itl_s is not None:
            known.itl.append(math.log(itl_s * gaps / (end_s - first_s)))
    ttft_s = _ttft_s(placed_s, prompt, others, pool, model)
    if ttft_s is not None:
        known.ttft.append(math.log(ttft_s / (first_s - placed_s)))


def _itl_s(
    start_s: float, end_s: float, context: float, gaps: float, others: Floats, pool: Pool, model: AnyStepModel
) -> float | None:
    """Predicted time between tokens of a request that decodes in this time, by the mean load that it meets."""
    begins_s = np.where(np.isnan(others[:, 1]), np.inf, others[:, 1])
    shares = np.clip(np.minimum(others[:, 2], end_s) - np.maximum(begins_s, start_s), 0, None) / (end_s - start_s)
    num = max(1, round(1 + float(shares.sum())))
    num = min(num, pool.engine.max_num_seqs)
    tokens = round(context + float((shares * (others[:, 3] + others[:, 4] / 2)).sum()))
    decode_s = model.line(num, tokens, window_tokens=tokens)[0]
    prompts = others[(begins_s > start_s) & (begins_s < end_s), 3]
    if not len(prompts):
        return decode_s
    mixed_s = _mixed_s(float(prompts.mean()), num, tokens, pool, model) - decode_s
    share = len(prompts) * mixed_s / (end_s - start_s)
    if share > FULL:  # the engine took longer than what it computed meanwhile: prompts alone would fill the time
        return None
    return decode_s / (1 - share)


def _ttft_s(placed_s: float, prompt: float, others: Floats, pool: Pool, model: AnyStepModel) -> float | None:
    """Predicted time to the first token; None if the request had to wait for a seat."""
    there = others[(others[:, 0] < placed_s) & (others[:, 2] > placed_s)]
    if len(there) + 1 > pool.engine.max_num_seqs:
        return None
    is_computed = there[:, 1] <= placed_s
    decoding, queued = there[is_computed], there[~is_computed]
    left = np.nan_to_num((queued[:, 1] - placed_s) / (queued[:, 1] - queued[:, 0]), nan=1.0)
    context = round(float((decoding[:, 3] + decoding[:, 4] / 2).sum()))
    num, engine = len(decoding), pool.engine
    total = prompt + float((left * queued[:, 3]).sum())
    computed_s = _mixed_s(total, num, context, pool, model)
    waited_s = (0.5 + engine.schedule_lag) * model.line(num, context, window_tokens=context)[0] if num else 0.0
    host_s = engine.request_overhead_s + engine.response_overhead_s + engine.tokenize_s_per_token * prompt
    return host_s + waited_s + computed_s


def _mixed_s(prompt_tokens: float, num: int, context: int, pool: Pool, model: AnyStepModel) -> float:
    """Seconds of the iterations that compute so many prompt tokens beside decoding sequences."""
    tokens = max(1, round(prompt_tokens))
    chunks = -(-tokens // max(1, pool.engine.max_num_batched_tokens - num))
    chunk = -(-tokens // chunks)
    return sum(model.line(num, context, [(chunk, i * chunk)], context)[0] for i in range(chunks))
