"""Predicted over observed latencies of each replica: whether its step-time model still holds, and which term does not.

A request that ends is noted, no more. Every few seconds, the noted ones are compared with what the step-time model
says of the load that they met: the requests that were decoding beside them, and the prompts that were computed
meanwhile. The ratio of a replica is the median over its last requests, so that a few odd ones do not matter. Queueing
for a seat is not predicted: a request that met as many others as the engine runs counts for its time between tokens
only. Prompt tokens that an answer reports as cached are not computed; where answers report none, all count as new.
Times at whose ends the gateway itself was late say nothing of the engine, and are left out.

From the same times `perf.term_factors` finds how much longer decoding, prompts and the time outside the batch take.
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
"""Requests of a replica that are remembered as the load that others met."""
NUM_COMPARED = 64
"""Requests of a replica in each comparison, at most, and in its median."""
NUM_TIMES = 160
"""Times of a replica from which the factors of the terms are found."""
LEAST_COMPARED = 16
"""A ratio of fewer requests is not reported."""
TOLERATED = 1.1
"""A larger factor between prediction and observation calls for a correction."""
TOLD: Mapping[Term, float] = {"decode": 1.05, "prefill": 1.05, "request": 1.3}
"""A term is told from this factor on, if it is as many standard errors from 1 as `SURE`."""
SURE = 3.0
SETTLED = 0.6
"""Share of the logarithm of `TOLD` below which a term that was told holds again."""
ALIKE = 0.03
"""Decoding and prompts that differ by less are told as one."""
STEP = 0.02
"""The model is corrected anew if a factor has changed by more."""
LATE = 0.05
"""Times are left out whose ends the gateway may have seen late by more than this share of them."""
LEAST_TOKENS = 8
"""Shorter answers do not show the time between tokens."""
NAMES: Mapping[Term, str] = {"decode": "decode", "prefill": "prefill", "request": "time outside the engine's batch"}
EVERY_ITERATION = "every iteration"


class TermDrift(Struct, forbid_unknown_fields=True):
    """A term of the step-time model that does not hold."""

    term: str
    """`decode`, `prefill`, `every iteration` where both are off alike, or `time outside the engine's batch`."""
    factor: float
    """Observed over predicted seconds. Above 1: slower than the profile."""
    error: float
    """Standard error of its logarithm."""
    since: float
    """Unix time of the first request that shows it."""
    text: str
    """As in "prefill 9% slower than the profile since 14:02"."""


class PredictionRatio(Struct, forbid_unknown_fields=True):
    """Predicted over observed latencies of a replica's last requests, medians. Below 1: it is slower than predicted."""

    ttft: float | None
    """Time to first token; null: too few requests that did not wait for a seat."""
    itl: float | None
    """Time between tokens; null: too few answers that were streamed."""
    correction: str | None
    """How to correct the predictions; null: they hold."""
    drift: list[TermDrift] = []
    """The terms that are off. Routers and planners in the gateway take them into account."""


class _Replica:
    """What is known of one replica's requests."""

    __slots__ = (
        "applied", "factors", "itl", "kinds", "observed_s", "parts", "pool", "reports_cached", "stays", "times_s",
        "told", "ttft", "waiting",
    )  # fmt: skip

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.stays: deque[tuple[float, ...]] = deque(maxlen=NUM_STAYS)
        self.waiting: deque[tuple[float, ...]] = deque(maxlen=NUM_COMPARED)
        """To be compared."""
        self.ttft: deque[float] = deque(maxlen=NUM_COMPARED)
        """Logarithms of predicted over observed."""
        self.itl: deque[float] = deque(maxlen=NUM_COMPARED)
        self.observed_s: deque[float] = deque(maxlen=NUM_TIMES)
        self.parts: deque[Seconds] = deque(maxlen=NUM_TIMES)
        """Predicted, of the same times."""
        self.kinds: deque[int] = deque(maxlen=NUM_TIMES)
        self.times_s: deque[float] = deque(maxlen=NUM_TIMES)
        """When they ended."""
        self.reports_cached = False
        self.factors: dict[Term, Factor] = {}
        self.told: dict[Term, float] = {}
        """Terms that do not hold, and since when."""
        self.applied = (1.0, 1.0)
        """Factors of prefill and decode with which its model is corrected."""

    def observe(self, observed_s: float, parts: Seconds, kind: int, time_s: float) -> None:
        if observed_s > 0 and parts.total > 0:
            self.observed_s.append(observed_s)
            self.parts.append(parts)
            self.kinds.append(kind)
            self.times_s.append(time_s)


DECODING, FIRST_TOKEN, FIRST_TOKEN_ALONE = range(3)
"""Kinds of times, of which each has a spread of its own: a first token beside others that decode waits for a part of an
iteration that is not known."""


class PredictionDrift:
    """Compares the requests of replicas whose pool has a step-time model. Belongs to one event loop."""

    def __init__(
        self,
        served: Callable[[str], tuple[Pool | None, Coefficients | None]],
        correct: Callable[[int, float, float], None] = lambda replica, prefill, decode: None,
        late_s: Callable[[float], float] = lambda time_s: 0.0,
    ) -> None:
        """`served` finds a pool by its name, with its step times; None: nothing is known of its GPU, and its requests
        are not compared. `correct` is called with a replica and the factors of its prompts and of its decoding.
        `late_s` is by how much the gateway may have seen something late at a time."""
        self._served, self._correct, self._late_s = served, correct, late_s
        self._models: dict[str, tuple[Pool | None, AnyStepModel | None]] = {}
        self._replicas: dict[int, _Replica] = {}

    def add(self, replica: int, pool: str, live: Live, end_s: float) -> None:
        """Note a request that this replica alone has answered in a stream."""
        if not live.enqueued_s < live.first_token_s < end_s:
            return
        known = self._known(replica, pool)
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

    def _known(self, replica: int, pool: str) -> _Replica:
        known = self._replicas.get(replica)
        if known is None:
            known = self._replicas[replica] = _Replica(pool)
        return known

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
        """Find the terms that are off, and correct the replica's model where they have changed."""
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
                    log.info("replica %d: %s is as the profile says again", id, NAMES[term])
            elif size >= least and size > SURE * factor.error and self._can_tell(known, term, factor):
                at = change_at(observed_s, parts, known.factors, term)
                known.told[term] = known.times_s[at]
                log.warning("replica %d: %s", id, self._drift_of(known, term, now).text)
        self._apply(id, known)

    @staticmethod
    def _can_tell(known: _Replica, term: Term, factor: Factor) -> bool:
        """Prompts that seem fast may have been in a prefix cache that no answer reports."""
        return term != "prefill" or factor.value > 1 or known.reports_cached

    def _apply(self, id: int, known: _Replica) -> None:
        prefill, decode = (known.factors[term].value if term in known.told else 1.0 for term in ("prefill", "decode"))
        if max(abs(math.log(prefill / known.applied[0])), abs(math.log(decode / known.applied[1]))) > STEP:
            known.applied = prefill, decode
            self._correct(id, prefill, decode)

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

    def corrections(self) -> dict[str, tuple[float, float]]:
        """By pool whose model does not hold: the factors of its prompts and its decoding, medians over its replicas."""
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
        """None: its requests are not compared, or too few were. `now`: on the clock of the requests."""
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
        """The terms that are off; decoding and prompts as one where they are off alike."""
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
        """Observed over predicted seconds by term, for the metrics page; none while too few requests were compared."""
        known = self._replicas.get(replica)
        for term, factor in known.factors.items() if known is not None else ():
            yield term, factor.value


def _told(name: str, factor: Factor, since: float) -> TermDrift:
    percent = 100 * (factor.value - 1)
    size = f"{abs(percent):.0f}% {'slower' if percent > 0 else 'faster'}"
    text = f"{name} {size} than the profile since {datetime.fromtimestamp(since):%H:%M}"
    return TermDrift(name, factor.value, factor.error, since, text)


def correction(pool: str) -> str:
    """What a user can do about predictions of a pool that do not hold."""
    return (
        f"headway calibrate RECORDS --fleet FLEET.yaml --pool {pool} --out {pool}.json --source live, with the folder"
        f" of headway serve --records; then `coefficients: {pool}.json` in the pool"
    )


def _median(logs: Sequence[float] | deque[float]) -> float | None:
    return math.exp(median(logs)) if len(logs) >= LEAST_COMPARED else None


def _compare(
    stay: Floats, load: Floats, pool: Pool, model: AnyStepModel, known: _Replica, late_s: Callable[[float], float]
) -> None:
    """Add the request's ratios and times to those of its replica."""
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
