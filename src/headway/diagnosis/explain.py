"""The explanation of one request, and of the slowest ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from headway.control.decisions import Decision
from headway.core.errors import HeadwayError, unknown
from headway.core.record import NUM_SEQUENCES, Cause, Outcome
from headway.diagnosis.expected import Expected, Predictions
from headway.diagnosis.history import DecisionLog, History
from headway.diagnosis.routers import Rehearsed, rehearsed
from headway.diagnosis.terms import Stay, terms
from headway.report.table import seconds

_EXPLAINED = 0.5
"""Share of the time to the first token that an expectation must reach to count as its cause."""
_LONGER = 1.5
"""Multiple of the expected decoding time above which decoding is said to take longer than expected."""
LATENCIES = ("e2e", "ttft", "tpot")


class Term(Struct, frozen=True):
    """A part of the request's time."""

    term: str
    seconds: float | None
    """Length of the term; None: unknown, because it is part of another term."""
    expected_s: float | None
    """Expectation of the step-time model; None: unknown."""


class ShownStay(Struct, frozen=True):
    """A stay at a replica, with times in seconds since the arrival."""

    replica: str
    from_s: float
    to_s: float
    ended: str
    """Reason of the end: `finished`, `crashed`, `moved`, ..."""


class Candidate(Struct, frozen=True):
    """A replica that could be chosen, with the values that the router saw."""

    replica: str
    in_flight: int
    waiting: int
    kv_share: float
    age_s: float | None
    score: float | None
    """The router's score; None if it gave none."""
    is_chosen: bool


class ShownDecision(Struct, frozen=True):
    """A logged decision about the request."""

    after_s: float | None
    """Time since the arrival; None if the records' start time is unknown."""
    what: str
    replica: str | None
    model: str
    attempt: int
    held_s: float
    why: str
    candidates: tuple[Candidate, ...]
    others: tuple[Rehearsed, ...]
    """The choices that other routers would have made."""


class Explanation(Struct, frozen=True):
    """The explanation of one request's duration."""

    request: str
    row: int
    """Row in `requests.parquet`."""
    arrived: str | None
    """Time in ISO 8601 and UTC; None if unknown, as in a simulation."""
    arrival_s: float
    """Time since the first arrival."""
    outcome: str
    model: str
    tier: int
    tenant: str
    replica: str | None
    """The last replica; None if the request was never placed."""
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    attempts: int
    moves: int
    e2e_s: float
    ttft_s: float | None
    """The measured TTFT; None if the answer was not streamed, or there was none."""
    tpot_s: float | None
    terms: tuple[Term, ...]
    """Terms whose seconds add up to `e2e_s`."""
    biggest: str
    """The longest term."""
    cause: str
    stays: tuple[ShownStay, ...]
    router: str
    """The router in the fleet file; empty if unknown."""
    decisions: tuple[ShownDecision, ...] | None
    """The logged decisions; None without a decision log."""
    notes: tuple[str, ...]
    """Unknown facts, with the reason."""
    same_id: tuple[int, ...] = ()
    """Rows of other requests that have the same id as this one."""


class Explainer:
    """Explains requests of one history."""

    def __init__(self, history: History, fleet: Path | None = None, log: DecisionLog | None = None) -> None:
        self._history, self._log = history, log
        self._predictions = Predictions(history, fleet)

    def explain(self, row: int, same_id: Sequence[int] = ()) -> Explanation:
        history = self._history
        times, stays = history.times(row), history.stays(row)
        found = self._terms(row, stays)
        decisions = self._decisions(row)
        expected = self._expected(row, stays)
        first_s, last = times.first_token_s, stays[-1] if stays else None
        began_s = history.began_s
        num_gaps = times.sequence_tokens - 1
        shown = tuple(_with_expected(found, expected))
        biggest = max(found, key=lambda term: found[term])
        return Explanation(
            request=history.request_id(row),
            row=row,
            arrived=None if began_s is None else _iso(began_s + times.arrival_s),
            arrival_s=times.arrival_s,
            outcome=Outcome(int(history.value("outcome", row))).name.lower(),
            model=history.name("model", row),
            tier=int(history.arrived("tier", row)),
            tenant=history.name("tenant", row),
            replica=None if last is None else history.replica_name(last.replica),
            prompt_tokens=int(history.arrived("prompt_tokens", row)),
            cached_prompt_tokens=int(history.value("cached_prompt_tokens", row, 0.0)),
            output_tokens=times.generated_tokens,
            attempts=int(history.value("attempts", row)),
            moves=int(history.value("moves", row)),
            e2e_s=times.end_s - times.arrival_s,
            ttft_s=None if isnan(first_s) else first_s - times.arrival_s,
            tpot_s=None if isnan(first_s) or num_gaps <= 0 else (times.end_s - first_s) / num_gaps,
            terms=shown,
            biggest=biggest,
            cause=self._cause(row, biggest, found, expected, stays, decisions),
            stays=tuple(
                ShownStay(
                    history.replica_name(stay.replica),
                    stay.from_s - times.arrival_s,
                    stay.to_s - times.arrival_s,
                    stay.cause.name.lower(),
                )
                for stay in stays
            ),
            router=self._predictions.router,
            decisions=None if decisions is None else tuple(self._shown(row, each) for each in decisions),
            notes=tuple(self._notes(row, found, decisions)),
            same_id=tuple(same_id),
        )

    def _terms(self, row: int, stays: Sequence[Stay]) -> dict[str, float]:
        times = self._history.times(row)
        is_whole = len(stays) > 1 or self._history.value("attempts", row) <= 1
        if not is_whole:  # an older version did not record when attempts failed
            held_s = min(stays[0].from_s, times.end_s) - times.arrival_s if stays else times.end_s - times.arrival_s
            return {"held": held_s, "engine": times.end_s - times.arrival_s - held_s}
        return terms(times, stays)

    def _expected(self, row: int, stays: Sequence[Stay]) -> Expected:
        return self._predictions.of(row, stays[-1].replica, stays[-1].from_s) if stays else Expected()

    def _decisions(self, row: int) -> list[Decision] | None:
        history, began_s = self._history, self._history.began_s
        if self._log is None:
            return None
        times = history.times(row)
        if began_s is None:
            return list(self._log.of(history.request_id(row), None, None))
        return list(self._log.of(history.request_id(row), began_s + times.arrival_s, began_s + times.end_s))

    def _shown(self, row: int, decision: Decision) -> ShownDecision:
        history, began_s = self._history, self._history.began_s
        start_s = began_s if began_s is not None else 0.0
        scores = dict(decision.scores)
        candidates = tuple(
            Candidate(
                each.name or self._logged_name(row, each.replica),
                each.in_flight,
                each.waiting,
                each.kv_share,
                each.age_s,
                scores.get(each.replica),
                each.replica == decision.choice,
            )
            for each in decision.replicas
        )
        return ShownDecision(
            after_s=decision.time_s - start_s - history.times(row).arrival_s,
            what=decision.what,
            replica=None if decision.choice is None else self._logged_name(row, decision.choice),
            model=decision.model,
            attempt=decision.attempt,
            held_s=decision.held_s,
            why=decision.why,
            candidates=candidates,
            others=tuple(self._others(row, decision, decision.time_s - start_s)) if decision.what == "placed" else (),
        )

    def _logged_name(self, row: int, number: int) -> str:
        replica = self._history.logged_replica(row, number)
        return str(number) if replica is None else self._history.replica_name(replica.id)

    def _others(self, row: int, decision: Decision, now: float) -> list[Rehearsed]:
        known: dict[int, Mapping[str, Any]] = {}
        for each in decision.replicas:
            replica = self._history.logged_replica(row, each.replica)
            if replica is not None:
                pool = self._predictions.pool(replica.pool)
                is_mixed = not replica.for_prefill and not replica.for_decode
                known[each.replica] = {
                    "pool": replica.pool,
                    "model": replica.model,
                    "gpu": replica.gpu,
                    "region": replica.region,
                    "max_num_seqs": replica.max_num_seqs,
                    "is_draining": False,
                    **({"role": "mixed", "is_single_phase": False} if is_mixed else {}),
                    **({} if pool is None else {"block_size_tokens": pool.engine.block_size_tokens}),
                }
        return rehearsed(decision, self._request(row, decision), known, self._history.ended_before(row, now), now)

    def _request(self, row: int, decision: Decision) -> Mapping[str, Any]:
        """The recorded attributes of the request's view."""
        history = self._history
        session = int(history.arrived("session_id", row, -1))
        slos = {name: history.arrived(name, row, float("nan")) for name in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s")}
        is_new = decision.attempt == decision.moves == 0
        return {
            **({"generated_tokens": 0, "answer_tokens": 0, "replica": -1} if is_new else {}),
            "id": row,
            "arrival_s": history.arrived("arrival_s", row),
            "model": decision.model,
            "tier": decision.tier,
            "prompt_tokens": int(history.arrived("prompt_tokens", row)),
            "attempt": decision.attempt,
            **{name: history.name(name, row) for name in ("region", "tenant", "lora")},
            "session_id": None if session < 0 else session,
            **{name: None if isnan(value) else value for name, value in slos.items()},
        }

    # Causes.

    def _cause(
        self,
        row: int,
        term: str,
        found: Mapping[str, float],
        expected: Expected,
        stays: Sequence[Stay],
        decisions: Sequence[Decision] | None,
    ) -> str:
        """The cause of the longest term, as far as it is known."""
        observed_s = found[term]
        if observed_s <= 0:
            return "it took no time"
        why: dict[str, Callable[[], str]] = {
            "held": lambda: self._why_held(stays, decisions),
            "failover": lambda: self._why_failed(stays),
            "move": lambda: "it was moved to another replica",
            "preemption": lambda: "the engine preempted it",
            "queue": lambda: self._at_placement(decisions, "it waited in the engine's queue"),
            "prefill": lambda: self._why_first_token(row, observed_s, expected, decisions, is_prefill=True),
            "first token": lambda: self._why_first_token(row, observed_s, expected, decisions),
            "decode": lambda: self._why_decode(row, observed_s, expected),
            "stall": lambda: f"no token came for {seconds(self._history.times(row).longest_gap_s)}",
            "engine": lambda: self._why_engine(row, expected),
        }
        return why[term]()

    def _why_held(self, stays: Sequence[Stay], decisions: Sequence[Decision] | None) -> str:
        reasons = [each.why for each in decisions or () if each.what in ("placed", "refused") and each.why]
        where = "the gateway held it" if stays else "the gateway held it, and never placed it"
        if reasons:
            return f"{where}: {reasons[0]}"
        return f"{where}; the reason is in the decision log (--decisions)" if decisions is None else where

    def _why_failed(self, stays: Sequence[Stay]) -> str:
        failed = [self._history.replica_name(stay.replica) for stay in stays if stay.cause is Cause.CRASHED]
        times = "once" if len(failed) == 1 else f"{len(failed)} times"
        return f"it failed {times}, at {', '.join(dict.fromkeys(failed))}, and went on elsewhere"

    def _why_first_token(
        self,
        row: int,
        observed_s: float,
        expected: Expected,
        decisions: Sequence[Decision] | None,
        is_prefill: bool = False,
    ) -> str:
        prompt = int(self._history.arrived("prompt_tokens", row))
        own_s, expected_s = expected.own_prompt_s, expected.first_token_s
        if own_s is not None and own_s >= _EXPLAINED * observed_s:
            return f"its prompt of {prompt:,} tokens, which takes {seconds(own_s)} on an idle engine"
        if expected_s is not None and expected_s >= _EXPLAINED * observed_s:
            return f"prompts and decoding of other requests at the replica, by which {seconds(expected_s)} is expected"
        if expected_s is not None:
            what = f"{observed_s / expected_s:.1f} times as long as expected"
        elif own_s is not None:
            what = "more requests were there than the engine runs at once, so that it queued"
        else:
            what = "nothing is expected of this replica"
        if is_prefill:
            return f"prefill of {prompt:,} tokens, {what}"
        return self._at_placement(decisions, f"{what}; whether it queued in the engine is unknown")

    def _at_placement(self, decisions: Sequence[Decision] | None, text: str) -> str:
        """The text, extended by the requests that waited at the replica when it was chosen."""
        for decision in reversed(decisions or ()):
            for each in decision.replicas:
                if decision.what == "placed" and each.replica == decision.choice:
                    age = "" if each.age_s is None else f", {seconds(each.age_s)} before"
                    return f"{text}; {each.waiting} requests waited there when it was placed{age}"
        return text

    def _why_decode(self, row: int, observed_s: float, expected: Expected) -> str:
        tokens = self._history.times(row).generated_tokens
        text = f"{tokens:,} output tokens"
        if expected.decode_s is None:
            return text
        if observed_s <= _LONGER * expected.decode_s:
            return f"{text}, for which {seconds(expected.decode_s)} is expected"
        if not expected.decode_s:
            return text
        return f"{text}, {observed_s / expected.decode_s:.1f} times as long as expected"

    def _why_engine(self, row: int, expected: Expected) -> str:
        prompt, tokens = int(self._history.arrived("prompt_tokens", row)), self._history.times(row).generated_tokens
        text = f"{prompt:,} prompt and {tokens:,} output tokens"
        if expected.first_token_s is None or expected.decode_s is None:
            return text
        return f"{text}, for which {seconds(expected.first_token_s + expected.decode_s)} is expected"

    def _notes(self, row: int, found: Mapping[str, float], decisions: Sequence[Decision] | None) -> list[str]:
        notes = []
        if "engine" in found:
            notes.append("the answer was not streamed, so that TTFT, queue, prefill and decode are unknown")
            if self._history.value("attempts", row) > 1:
                notes[-1] = "these records do not say when attempts failed"
        if "first token" in found:
            notes.append("the engine does not say how long the request queued in it: queue and prefill are one part")
        if self._predictions.why_unknown:
            notes.append(f"nothing is expected: {self._predictions.why_unknown}")
        if decisions is None:
            notes.append("candidates and scores are unknown: give the decision log with --decisions")
        elif not decisions:
            notes.append("the decision log has no line about this request")
        if self._log is not None and self._log.num_dropped:
            notes.append(f"{self._log.num_dropped:,} lines of the decision log were dropped, as the disk was too slow")
        return notes


def _with_expected(found: Mapping[str, float], expected: Expected) -> list[Term]:
    """The terms with their expectations. A term that is not expected to take time has 0."""
    shown = []
    for term, observed_s in found.items():
        expected_s: float | None = 0.0
        if term == "first token":
            shown += [Term("queue", None, None), Term("prefill", None, expected.own_prompt_s)]
            expected_s = expected.first_token_s
        elif term == "prefill":
            expected_s = expected.own_prompt_s
        elif term == "queue":
            both = expected.first_token_s, expected.own_prompt_s
            expected_s = None if both[0] is None or both[1] is None else max(both[0] - both[1], 0.0)
        elif term == "decode":
            expected_s = expected.decode_s
        elif term == "engine":
            known = expected.first_token_s is not None and expected.decode_s is not None
            expected_s = (expected.first_token_s or 0.0) + (expected.decode_s or 0.0) if known else None
        shown.append(Term(term, observed_s, expected_s))
    return shown


def explain(history: History, request_id: str, decisions: Path | None = None, fleet: Path | None = None) -> Explanation:
    """Explain a request; of several with this id, the last one. `decisions`: the decision log. `fleet`: the fleet file,
    if the records do not contain it. Raises HeadwayError for an unknown id, with the nearest ids."""
    *others, row = history.rows_of(request_id)
    log = None if decisions is None else DecisionLog(decisions, [history.request_id(row)])
    return Explainer(history, fleet, log).explain(row, others)


def slowest(
    history: History, num: int, by: str = "e2e", decisions: Path | None = None, fleet: Path | None = None
) -> list[Explanation]:
    """Explain the slowest requests by `e2e`, `ttft` or `tpot`, slowest first. Requests without the latency are left
    out. Raises HeadwayError for another `by`."""
    if by not in LATENCIES:
        raise unknown("latency", by, LATENCIES)
    if num < 1:
        raise HeadwayError(f"{num} requests; expected 1 or more")
    table: Mapping[str, Any] = history.records.requests
    rows = history.rows
    arrival_s, first_s = history.records.workload["arrival_s"][rows], table["first_token_s"]
    tokens = table["generated_tokens"] / np.maximum(table.get(NUM_SEQUENCES, 1), 1)
    gaps: Any = np.where(tokens > 1, tokens - 1, np.nan)
    latency_s = {
        "e2e": table["end_s"] - arrival_s,
        "ttft": first_s - arrival_s,
        "tpot": (table["end_s"] - first_s) / gaps,
    }[by]
    order = np.argsort(-latency_s, kind="stable")[: int(np.count_nonzero(~np.isnan(latency_s)))][:num]
    chosen = rows[order].tolist()
    log = None if decisions is None else DecisionLog(decisions, {history.request_id(row) for row in chosen})
    explainer = Explainer(history, fleet, log)
    return [explainer.explain(row) for row in chosen]


def _iso(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
