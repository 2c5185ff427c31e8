"""Ratios of predicted to observed latencies of each replica: they show whether its step-time model still holds, and
which term is wrong.

Ended requests are collected. Every few seconds their latencies are compared with the step-time model's prediction for
their load: the requests that decoded at the same time, and the prompts computed meanwhile. A replica's ratio is the
median over its last requests, so that outliers do not matter. Waiting for a batch slot is not predicted: a request that
arrived at a full batch counts only for its time between tokens. Prompt tokens that an answer reports as cached cost no
compute; if answers do not report cached tokens, all prompt tokens count as new. Times that end while the gateway itself
was late are left out. From the remaining times, `perf.term_factors` estimates the factors of decoding, prompts and the
time outside the batch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from statistics import median

import numpy as np
from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.control.live import Live
from headway.core.errors import HeadwayError
from headway.core.fleet import Pool
from headway.perf.expected_latency import FULL, Floats, Seconds, decode_parts, first_token_parts, is_undisturbed
from headway.perf.speculation import AnyStepModel, step_model
from headway.perf.term_factors import TERMS, Factor, Term, change_at, fit

log = logging.getLogger("headway.gateway")
COMPARISON_PERIOD_S = 5.0
"""Time between two comparisons."""
NUM_STAYS = 512
"""Number of a replica's requests that are kept as the load of other requests."""
NUM_COMPARED = 64
"""Largest number of a replica's requests in each comparison and in its median."""
NUM_TIMES = 160
"""Number of a replica's times from which the factors of the terms are estimated."""
LEAST_COMPARED = 16
"""Minimum number of requests for a ratio. A ratio over fewer requests is not reported."""
TOLERATED = 1.1
"""Largest factor between prediction and observation that requires no correction."""
TOLD: Mapping[Term, float] = {"decode": 1.05, "prefill": 1.05, "request": 1.3}
"""Smallest factor from which a term is reported, if the factor is also at least `SURE` standard errors from 1."""
SURE = 3.0
SETTLED = 0.6
"""A reported term counts as correct again when the logarithm of its factor is below this share of the logarithm of
`TOLD`."""
ALIKE = 0.03
"""Maximum difference between the factors of decoding and prompts that are reported as one term."""
STEP = 0.02
"""Smallest change of a factor after which the model is corrected again."""
LATE = 0.05
"""Maximum possible delay of the gateway, as a share of a measured time, up to which the time is used."""
LEAST_TOKENS = 8
"""Minimum tokens of an answer that is used for the time between tokens."""
NAMES: Mapping[Term, str] = {"decode": "decode", "prefill": "prefill", "request": "time outside the engine's batch"}
EVERY_ITERATION = "every iteration"


class TermDrift(Struct, forbid_unknown_fields=True):
    """A wrong term of the step-time model."""

    term: str
    """`decode`, `prefill`, `every iteration` if both are wrong by the same factor, or `time outside the engine's
    batch`."""
    factor: float
    """Observed over predicted seconds. Above 1: slower than the profile."""
    error: float
    """Standard error of the factor's logarithm."""
    since: float
    """Unix time of the first request that shows the drift."""
    text: str
    """Text such as "prefill 9% slower than the profile since 14:02"."""


class PredictionRatio(Struct, forbid_unknown_fields=True):
    """Predicted over observed latencies of a replica's last requests, as medians. Below 1: the replica is slower than
    predicted."""

    ttft: float | None
    """Ratio of the time to first token; null if too few requests started without waiting for a batch slot."""
    itl: float | None
    """Ratio of the time between tokens; null if too few answers were streamed."""
    correction: str | None
    """The remedy for wrong predictions; null if the predictions are right."""
    drift: list[TermDrift] = []
    """The wrong terms. Routers and planners in the gateway take them into account."""


class _Replica:
    """State of one replica's requests."""

    __slots__ = (
        "applied", "factors", "itl", "kinds", "observed_s", "parts", "pool", "reports_cached", "stays", "times_s",
        "told", "ttft", "waiting",
    )  # fmt: skip

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.stays: deque[tuple[float, ...]] = deque(maxlen=NUM_STAYS)
        self.waiting: deque[tuple[float, ...]] = deque(maxlen=NUM_COMPARED)
        """Requests that are not compared yet."""
        self.ttft: deque[float] = deque(maxlen=NUM_COMPARED)
        """Logarithms of the ratios of predicted to observed times."""
        self.itl: deque[float] = deque(maxlen=NUM_COMPARED)
        self.observed_s: deque[float] = deque(maxlen=NUM_TIMES)
        self.parts: deque[Seconds] = deque(maxlen=NUM_TIMES)
        """The predictions of the same times, by term."""
        self.kinds: deque[int] = deque(maxlen=NUM_TIMES)
        self.times_s: deque[float] = deque(maxlen=NUM_TIMES)
        """Ends of the times."""
        self.reports_cached = False
        self.factors: dict[Term, Factor] = {}
        self.told: dict[Term, float] = {}
        """Maps each wrong term to the time since which it is reported."""
        self.applied = (1.0, 1.0)
        """Factors of prefill and decode with which the replica's model is corrected."""

    def observe(self, observed_s: float, parts: Seconds, kind: int, time_s: float) -> None:
        if observed_s > 0 and parts.total > 0:
            self.observed_s.append(observed_s)
            self.parts.append(parts)
            self.kinds.append(kind)
            self.times_s.append(time_s)


DECODING, FIRST_TOKEN, FIRST_TOKEN_ALONE = range(3)
"""Kinds of times, each with its own spread. A first token beside decoding requests waits for an unknown part of an
iteration."""


class PredictionDrift:
    """Compares the requests of replicas whose pool has a step-time model. Belongs to one event loop."""

    def __init__(
        self,
        served: Callable[[str], tuple[Pool | None, Coefficients | None]],
        correct: Callable[[int, float, float], None] = lambda replica, prefill, decode: None,
        late_s: Callable[[float], float] = lambda time_s: 0.0,
    ) -> None:
        """`served` finds a pool by name, with its step times. If the pool's GPU is unknown, the step times are None,
        and the pool's requests are not compared. `correct` is called with a replica and the factors of its prefill and
        decode. `late_s(time_s)` is the largest delay of the gateway at that time."""
        self._served, self._correct, self._late_s = served, correct, late_s
        self._models: dict[str, tuple[Pool | None, AnyStepModel | None]] = {}
        self._replicas: dict[int, _Replica] = {}

    def add(self, replica: int, pool: str, live: Live, end_s: float) -> None:
        """Collect a request that this replica alone has answered in a stream."""
        if not live.enqueued_s < live.first_token_s < end_s:
            return
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Replica(pool)
        cached = min(max(live.cached_tokens, 0), live.prompt_tokens)
        known.reports_cached = known.reports_cached or cached > 0
        stay = (
            live.enqueued_s,
            live.first_token_s,
            end_s,
            live.prompt_tokens,
            live.generated_tokens,
            live.prompt_tokens - cached,
        )
        known.stays.append(stay)
        known.waiting.append(stay)

    def compare(self, in_flight: Mapping[int, Iterable[Live]], now: float) -> None:
        """Compare the requests collected since the last call. `in_flight`: the running requests by replica."""
        for id, known in self._replicas.items():
            if not known.waiting:
                continue
            pool, model = self._model(known.pool)
            if model is None or pool is None:
                known.waiting.clear()
                continue
            running = [
                (
                    live.enqueued_s,
                    live.first_token_s,
                    now,
                    live.prompt_tokens,
                    live.generated_tokens,
                    live.prompt_tokens,
                )
                for live in in_flight.get(id, ())
            ]
            load = np.array([*known.stays, *running], "f8")
            for stay in known.waiting:
                _compare(np.array(stay), load, pool, model, known, self._late_s)
            known.waiting.clear()
            self._find_factors(id, known, now)

    def _find_factors(self, id: int, known: _Replica, now: float) -> None:
        """Find the wrong terms, and correct the replica's model if they have changed."""
        if len(known.observed_s) < LEAST_COMPARED:
            return
        observed_s, parts = np.array(known.observed_s), np.array(known.parts)
        known.factors = fit(observed_s, parts, np.array(known.kinds))
        for term in TERMS:
            factor = known.factors[term]
            size, least = abs(math.log(factor.value)), math.log(TOLD[term])
            if term in known.told:
                if size < SETTLED * least:
                    del known.told[term]
                    log.info("%s/%d: %s is as the profile says again", known.pool, id, NAMES[term])
            elif size >= least and size > SURE * factor.error and self._can_tell(known, term, factor):
                at = change_at(observed_s, parts, known.factors, term)
                known.told[term] = known.times_s[at]
                log.warning("%s/%d: %s", known.pool, id, self._drift_of(known, term, now).text)
        self._apply(id, known)

    @staticmethod
    def _can_tell(known: _Replica, term: Term, factor: Factor) -> bool:
        """Whether a term's factor can be trusted. It cannot if prompts seem fast, because they may come from a prefix
        cache that no answer reports."""
        return term != "prefill" or factor.value > 1 or known.reports_cached

    def _apply(self, id: int, known: _Replica) -> None:
        prefill, decode = (known.factors[term].value if term in known.told else 1.0 for term in ("prefill", "decode"))
        if max(abs(math.log(prefill / known.applied[0])), abs(math.log(decode / known.applied[1]))) > STEP:
            known.applied = prefill, decode
            self._correct(id, prefill, decode)

    def _model(self, name: str) -> tuple[Pool | None, AnyStepModel | None]:
        """A pool and its step-time model, rebuilt if the fleet file has changed; None if there is no model."""
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
        """Forget a replica that was removed or whose engine restarted."""
        self._replicas.pop(replica, None)

    def corrections(self) -> dict[str, tuple[float, float]]:
        """Maps each pool with a wrong model to the factors of prefill and decode, as medians over its replicas."""
        pools: dict[str, list[tuple[float, float]]] = {}
        for known in self._replicas.values():
            if known.factors:
                pools.setdefault(known.pool, []).append(known.applied)
        found = {
            pool: (median(prefill for prefill, _ in each), median(decode for _, decode in each))
            for pool, each in pools.items()
        }
        return {pool: factors for pool, factors in found.items() if factors != (1.0, 1.0)}

    def ratio(self, replica: int, now: float = 0.0) -> PredictionRatio | None:
        """The replica's ratio; None if its requests are not compared, or too few were compared. `now` is on the clock
        of the requests."""
        known = self._replicas.get(replica)
        if known is None:
            return None
        ttft, itl = _median(known.ttft), _median(known.itl)
        if ttft is None and itl is None:
            return None
        worst = max(abs(math.log(each)) for each in (ttft, itl) if each is not None)
        text = correction(known.pool) if worst > math.log(TOLERATED) else None
        return PredictionRatio(ttft, itl, text, self._drifts(known, now))

    def _drifts(self, known: _Replica, now: float) -> list[TermDrift]:
        """The wrong terms. Decoding and prompts are one term if both are wrong by the same factor."""
        found = [self._drift_of(known, term, now) for term in TERMS if term in known.told]
        if {"decode", "prefill"} <= known.told.keys():
            decode, prefill = found[:2]
            spread = math.hypot(decode.error, prefill.error)
            if abs(math.log(decode.factor / prefill.factor)) < max(ALIKE, 2 * spread):
                sure = decode if decode.error < prefill.error else prefill
                since = min(decode.since, prefill.since)
                found[:2] = [_told(EVERY_ITERATION, Factor(sure.factor, sure.error), since)]
        return found

    @staticmethod
    def _drift_of(known: _Replica, term: Term, now: float) -> TermDrift:
        return _told(NAMES[term], known.factors[term], time.time() - (now - known.told[term]))

    def gauges(self, replica: int) -> Iterator[tuple[str, float]]:
        """The known ratios by latency, for the metrics page."""
        ratio = self.ratio(replica)
        for name in ("ttft", "itl") if ratio is not None else ():
            if (value := getattr(ratio, name)) is not None:
                yield name, value

    def factor_gauges(self, replica: int) -> Iterator[tuple[str, float]]:
        """Observed over predicted seconds by term, for the metrics page; empty while too few requests were compared."""
        known = self._replicas.get(replica)
        for term, factor in known.factors.items() if known is not None else ():
            yield term, factor.value


def _told(name: str, factor: Factor, since: float) -> TermDrift:
    percent = 100 * (factor.value - 1)
    size = f"{abs(percent):.0f}% {'slower' if percent > 0 else 'faster'}"
    text = f"{name} {size} than the profile since {datetime.fromtimestamp(since):%H:%M}"
    return TermDrift(name, factor.value, factor.error, since, text)


def correction(pool: str) -> str:
    """A text for the user: the remedy for wrong predictions of a pool."""
    return (
        f"headway calibrate RECORDS --fleet FLEET.yaml --pool {pool} --out {pool}.json --source live, with the folder"
        f" of headway serve --records; then `coefficients: {pool}.json` in the pool"
    )


def _median(logs: Sequence[float] | deque[float]) -> float | None:
    return math.exp(median(logs)) if len(logs) >= LEAST_COMPARED else None


def _compare(
    stay: Floats, load: Floats, pool: Pool, model: AnyStepModel, known: _Replica, late_s: Callable[[float], float]
) -> None:
    """Add the request's ratios and times to the ratios and times of its replica."""
    placed_s, first_s, end_s, _, tokens, computed = stay.tolist()
    others = load[(load[:, :3] != stay[:3]).any(axis=1)]
    others = others[(others[:, 0] < end_s) & (others[:, 2] > placed_s)]
    first_late_s = late_s(first_s)
    if tokens - 1 >= LEAST_TOKENS and max(first_late_s, late_s(end_s)) <= LATE * (end_s - first_s):
        parts = decode_parts(stay, others, pool, model)
        if parts.prefill < FULL * (end_s - first_s):
            known.itl.append(math.log(parts.total / (end_s - first_s)))
            known.observe(end_s - first_s, parts, DECODING, end_s)
    if max(first_late_s, late_s(placed_s)) > LATE * (first_s - placed_s):
        return
    first = first_token_parts(placed_s, computed, others, pool, model)
    if first is not None:
        known.ttft.append(math.log(first.total / (first_s - placed_s)))
        if is_undisturbed(stay, others):
            known.observe(first_s - placed_s, first, FIRST_TOKEN if first.decode else FIRST_TOKEN_ALONE, end_s)
