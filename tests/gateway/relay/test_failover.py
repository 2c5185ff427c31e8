"""Failover: what follows a failed attempt, in every state that a request can be in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("httptools")

from headway.core.record import Outcome
from headway.gateway.relay.failover import (
    Attempts,
    Failure,
    Situation,
    error_of_end,
    failure_of,
    is_failed,
    is_replicas_fault,
    reason_here,
)
from headway.gateway.scheduling.in_flight import RESUMES, ReleaseReason
from headway.gateway.scheduling.sglang_disaggregation import PrefillLegError
from headway.gateway.upstream.errors import (
    BrokenOffError,
    EngineError,
    ExhaustedError,
    NoAnswerError,
    RefusedError,
    ReportedRefusalError,
    TooLongError,
    UnconfirmedRefusalError,
    UnreachableError,
)
from relay_alone import engine
from scripted import Exchange

MAX_ATTEMPTS = 3


async def _unused(exchange: Exchange) -> None:
    raise AssertionError("nothing is sent")


REFUSAL = engine(1, _unused), UnconfirmedRefusalError(404, b"no")
KINDS = {
    Failure.TOO_LONG: [TooLongError(400, b"")],
    Failure.NO_DESCRIPTOR: [ExhaustedError()],
    Failure.UNCONFIRMED: [UnconfirmedRefusalError(404, b"")],
    Failure.REFUSED: [ReportedRefusalError(400, b""), ReportedRefusalError(422, b"")],
    Failure.UNREACHABLE: [UnreachableError()],
    Failure.UNTOUCHED: [RefusedError(429, b""), RefusedError(503, b""), ReportedRefusalError(429, b"")],
    Failure.BROKEN_OFF: [BrokenOffError()],
    Failure.OTHER: [
        EngineError(),
        NoAnswerError(),
        RefusedError(500, b""),
        RefusedError(404, b""),
        ReportedRefusalError(408, b""),
    ],
}


def _attempts(most: int) -> Attempts:
    attempts = Attempts()
    attempts.max_attempts = most
    return attempts


class State(SimpleNamespace):
    """Everything that a decision depends on."""

    failure: Failure
    situation: Situation
    num_failures: int
    num_broken: int
    has_refusal: bool

    @property
    def is_last(self) -> bool:
        return self.num_failures + (self.failure is not Failure.UNREACHABLE) >= MAX_ATTEMPTS

    def decide(self) -> tuple[ReleaseReason | None, Attempts]:
        attempts = _attempts(MAX_ATTEMPTS)
        for number in range(self.num_broken):
            attempts.after(Failure.BROKEN_OFF, Situation(may_break=True), f"broken {number}", 0)
        attempts.num_failures, attempts.refusal = self.num_failures, REFUSAL if self.has_refusal else None
        return attempts.after(self.failure, self.situation, "replica", 0), attempts


def _states() -> Iterator[State]:
    num = len(Situation._fields)
    for failure, *flags in product(Failure, *[(False, True)] * num):
        for num_failures, num_broken, has_refusal in product(range(MAX_ATTEMPTS), (0, 1), (False, True)):
            yield State(
                failure=failure,
                situation=Situation(*flags),
                num_failures=num_failures,
                num_broken=num_broken,
                has_refusal=has_refusal,
            )


STATES = list(_states())
Row = tuple[Callable[[State], bool], ReleaseReason | None]
TABLE: dict[str, Row] = {
    "moves": (lambda s: s.situation.is_moving, ReleaseReason.MOVED),
    "too long": (lambda s: s.failure is Failure.TOO_LONG, ReleaseReason.EXHAUSTED),
    "no descriptor": (lambda s: s.failure is Failure.NO_DESCRIPTOR, None),
    "opaque": (lambda s: s.situation.is_opaque, None),
    "refused what it had begun": (lambda s: s.failure is Failure.REFUSED and s.situation.has_begun, None),
    "second engine": (lambda s: s.failure is Failure.BROKEN_OFF and s.situation.may_break and s.num_broken == 1, None),
    "last, with a fallback": (
        lambda s: s.is_last and s.situation.has_fallback and not s.situation.has_begun and not s.has_refusal,
        ReleaseReason.EXHAUSTED,
    ),
    "last": (lambda s: s.is_last, None),
    "cannot be continued": (
        lambda s: s.situation.has_begun and s.situation.has_output and not s.situation.can_resume,
        None,
    ),
    "prefill replica of a pair": (lambda s: s.situation.is_prefill_leg, ReleaseReason.PREFILL_LEG_FAILED),
    "prefill": (lambda s: s.situation.is_prefill, ReleaseReason.PREFILL_FAILED),
    "not begun": (
        lambda s: s.failure in (Failure.UNREACHABLE, Failure.UNTOUCHED),
        ReleaseReason.FAILED_BEFORE_FETCH,
    ),
    "any other": (lambda s: True, ReleaseReason.FAILED),
}


def test_every_state_has_the_step_of_the_first_row_that_fits() -> None:
    reached = set[str]()
    for state in STATES:
        row = next(name for name, (fits, _) in TABLE.items() if fits(state))
        reached.add(row)
        assert state.decide()[0] is TABLE[row][1], (row, state)
    assert reached == set(TABLE)


def test_a_client_is_never_sent_a_second_beginning_nor_an_engine_a_request_too_many() -> None:
    for state in STATES:
        reason, attempts = state.decide()
        goes_on = reason in RESUMES and reason is not ReleaseReason.MOVED
        situation = state.situation
        if goes_on:
            assert not situation.is_opaque or state.failure is Failure.TOO_LONG
            if situation.has_begun and situation.has_output and state.failure is not Failure.TOO_LONG:
                assert situation.can_resume
        if goes_on and reason is not ReleaseReason.EXHAUSTED:
            assert attempts.num_failures < MAX_ATTEMPTS and not attempts.is_quarantined
        if reason is None:
            assert attempts.client_error("replica").status >= 400


def test_every_kind_has_an_example() -> None:
    assert not set(Failure) - set(KINDS), "add an error of each new kind to KINDS"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_error_has_one_kind(kind: Failure) -> None:
    for error in KINDS[kind]:
        assert failure_of(error) is kind
        about_request = isinstance(error, TooLongError | ExhaustedError | UnconfirmedRefusalError)
        assert is_replicas_fault(kind) == (not about_request and kind is not Failure.REFUSED)


def test_an_error_of_the_prefill_replica_is_judged_by_its_cause() -> None:
    cause = BrokenOffError()
    assert failure_of(PrefillLegError(REFUSAL[0], cause)) is Failure.OTHER, "the decode replica has not broken off"
    assert failure_of(cause) is Failure.BROKEN_OFF


@pytest.mark.parametrize(("tokens", "num"), [((0, 0, 0), 3), ((3, 6, 9), 3), ((8, 16, 24), 1), ((7, 14, 22), 1)])
def test_failures_are_counted_since_the_last_progress(tokens: tuple[int, ...], num: int) -> None:
    """Eight tokens after the last failure are progress."""
    attempts = _attempts(9)
    for each in tokens:
        attempts.after(Failure.OTHER, Situation(), "replica", each)
    assert attempts.num_failures == num
    attempts.after(Failure.UNREACHABLE, Situation(), "replica", tokens[-1])
    assert attempts.num_failures == num, "a request that was not sent has not failed"


def test_a_lost_connection_is_used_up_once() -> None:
    attempts = _attempts(2)
    assert (attempts.may_resend(), attempts.may_resend(), attempts.num_failures) == (True, False, 1)
    assert not _attempts(1).may_resend()


def test_a_refusal_is_confirmed_once_by_a_replica_that_could_answer() -> None:
    for is_whole, has_alternative, has_begun, has_refusal, num in product(*[(False, True)] * 4, range(MAX_ATTEMPTS)):
        attempts = _attempts(MAX_ATTEMPTS)
        attempts.num_failures, attempts.refusal = num, REFUSAL if has_refusal else None
        expected = is_whole and has_alternative and not (has_begun or has_refusal) and num < MAX_ATTEMPTS - 1
        assert attempts.may_confirm(is_whole, has_alternative, has_begun) == expected


def test_another_model_begins_without_the_failures_of_the_last_one() -> None:
    attempts = _attempts(1)
    attempts.after(Failure.OTHER, Situation(has_fallback=True), "replica", 0)
    attempts.refusal = REFUSAL
    assert attempts.or_refusal(None) is REFUSAL[1]
    attempts.start_model()
    assert (attempts.num_failures, attempts.or_refusal(None)) == (0, None)


@pytest.mark.parametrize(
    ("status", "has_begun", "expected"),
    [(404, False, False), (404, True, True), (429, False, True), (503, False, True), (501, False, False)],
)
def test_a_status_is_the_clients_answer_or_a_failure(status: int, has_begun: bool, expected: bool) -> None:
    assert is_failed(status, has_begun) == expected


def test_the_client_of_an_ended_request_is_told_why() -> None:
    assert error_of_end(Outcome.FINISHED, is_cut_off=False) is None
    for is_cut_off, status in ((True, 503), (False, 504)):
        error = error_of_end(Outcome.CANCELLED, is_cut_off)
        assert error is not None and error.status == status


@pytest.mark.parametrize("is_moving", [False, True])
@pytest.mark.parametrize("reason", ReleaseReason, ids=lambda reason: reason.name)
def test_a_workers_reason_fits_what_the_scheduler_knows(reason: ReleaseReason, is_moving: bool) -> None:
    here = reason_here(reason, is_moving)
    if reason in RESUMES:
        assert (here is ReleaseReason.MOVED) == is_moving, "a move that has begun is ended"
    assert here not in (ReleaseReason.ACKNOWLEDGED,), "the request has not ended"
    if here is not reason:
        assert here is (ReleaseReason.MOVED if is_moving and reason in RESUMES else ReleaseReason.CANCELLED)
