"""Failover: what follows when an engine fails, or refuses, a request.

`Attempts` counts the attempts of one request. Its method `after` decides, from the kind of failure, the attempts so
far, and where the request and its answer are. The relay carries the decision out. Nothing here does I/O or reads a
clock.

| the failed attempt | what follows |
|---|---|
| was ended by a move or a pause | the request continues at the move's target, or is held |
| found the request too long for the model | a fallback answers |
| found no free descriptor in this process | the client gets the error |
| had sent the client bytes that mean nothing here | the client's connection is closed |
| refused what it had begun to answer | the client gets the error |
| broke the second engine | the request is quarantined |
| was the last one | a fallback answers, if this model has neither begun nor refused; else the client gets the error |
| had begun an answer that no other engine can continue | the client gets the error |
| ran at a pair's prefill replica | the request is placed again |
| computed the prompt for another replica | that one computes it |
| was not begun by the engine | the request is placed again; a KV cache that is stored for it can still be fetched |
| any other | the request is placed again, and its answer continues from the tokens so far |

The first row that fits holds.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final, NamedTuple

from headway.core.record import Outcome
from headway.gateway.errors import ApiError
from headway.gateway.relay.quarantine import BrokenEngines
from headway.gateway.scheduling.in_flight import RESUMES, ReleaseReason
from headway.gateway.upstream.engine import EngineEndpoint
from headway.gateway.upstream.errors import (
    BrokenOffError,
    EngineError,
    ExhaustedError,
    RefusedError,
    ReportedRefusalError,
    TooLongError,
    UnconfirmedRefusalError,
    UnreachableError,
    client_error,
    is_retryable,
)

_PROGRESS_TOKENS: Final = 8
"""Number of new tokens after which the next failure counts as the first. With fewer tokens, the replica made no
progress."""


class Failure(IntEnum):
    """Failures that need special treatment."""

    TOO_LONG = auto()
    """Refused: the model's context cannot hold the request."""
    NO_DESCRIPTOR = auto()
    """This process could not open a connection; the engine may be fine."""
    UNCONFIRMED = auto()
    """The engine refused the request, and another replica must confirm that the request is the cause."""
    REFUSED = auto()
    """The engine refused within an answer with status 200, as other engines would."""
    UNREACHABLE = auto()
    UNTOUCHED = auto()
    """The engine was reached, but did not start the request."""
    BROKEN_OFF = auto()
    OTHER = auto()


_NOT_THE_REPLICAS: Final = frozenset(
    {
        Failure.TOO_LONG,
        Failure.NO_DESCRIPTOR,
        Failure.UNCONFIRMED,
        Failure.REFUSED,
    }
)


def failure_of(error: EngineError) -> Failure:
    """The kind of a failed attempt."""
    if isinstance(error, TooLongError):
        return Failure.TOO_LONG
    if isinstance(error, ExhaustedError):
        return Failure.NO_DESCRIPTOR
    if isinstance(error, UnconfirmedRefusalError):
        return Failure.UNCONFIRMED
    if isinstance(error, ReportedRefusalError) and not is_retryable(error.status):
        return Failure.REFUSED
    if isinstance(error, UnreachableError):
        return Failure.UNREACHABLE
    if isinstance(error, BrokenOffError):
        return Failure.BROKEN_OFF
    return Failure.UNTOUCHED if error.is_untouched else Failure.OTHER


def is_replicas_fault(failure: Failure) -> bool:
    """Whether the failure counts against the health of the replica."""
    return failure not in _NOT_THE_REPLICAS


def is_failed(status: int, has_begun: bool) -> bool:
    """Whether a status other than 200 means that the attempt failed. Otherwise the response is the client's answer."""
    return has_begun or is_retryable(status)


class Situation(NamedTuple):
    """The state of a request and its answer when an attempt has failed."""

    is_moving: bool = False
    """Whether a move or a pause ended the attempt."""
    is_opaque: bool = False
    """Whether the client received bytes that this process cannot interpret."""
    has_begun: bool = False
    """Whether the client received the start of a response."""
    has_output: bool = False
    """Whether this start of a response contains a part of the answer, or may contain one."""
    can_resume: bool = False
    """Whether another engine can continue the answer."""
    has_fallback: bool = False
    """Whether another model may answer."""
    is_prefill: bool = False
    """Whether the attempt only computed the prompt for another replica."""
    is_prefill_leg: bool = False
    """Whether the attempt failed at the prefill replica of a dual dispatch."""
    may_break: bool = False
    """Whether the request may have broken the engine. It may not if an engine has answered a copy of the request
    lately."""


class Attempts:
    """The attempts of one request so far."""

    # Initial values are class attributes, because most requests never change them.
    max_attempts = 1
    """Maximum attempts at one model; the gateway's setting."""
    num_failures = 0
    """Failures without progress in between, at the current model."""
    tokens_at_start = 0
    """Answer tokens at the start of the current attempt."""
    error: EngineError | None = None
    """The last attempt's failure."""
    refusal: tuple[EngineEndpoint, RefusedError] | None = None
    """(replica, refusal) that another replica must confirm, or after which a fallback may answer."""
    _tokens_at_failure = 0
    _broken: BrokenEngines | None = None

    def after(self, failure: Failure, situation: Situation, replica: str, tokens: int) -> ReleaseReason | None:
        """Count a failed attempt at `replica` after `tokens` answer tokens. Returns why the request leaves the replica,
        which tells the scheduler how to continue; None: the client gets `client_error`."""
        if situation.is_moving:
            return ReleaseReason.MOVED
        if failure is Failure.TOO_LONG:
            return ReleaseReason.EXHAUSTED
        if failure is Failure.NO_DESCRIPTOR or situation.is_opaque:
            return None
        if failure is Failure.REFUSED and situation.has_begun:
            return None
        self._count(failure, tokens)
        if failure is Failure.BROKEN_OFF and situation.may_break:
            self._count_break(replica, tokens)
            if self.is_quarantined:
                return None
        if self.num_failures >= self.max_attempts:
            can_fall_back = situation.has_fallback and not situation.has_begun and self.refusal is None
            return ReleaseReason.EXHAUSTED if can_fall_back else None
        if situation.has_begun and situation.has_output and not situation.can_resume:
            return None
        if situation.is_prefill_leg:
            return ReleaseReason.PREFILL_LEG_FAILED
        if situation.is_prefill:
            return ReleaseReason.PREFILL_FAILED
        is_untouched = failure in (Failure.UNREACHABLE, Failure.UNTOUCHED)
        return ReleaseReason.FAILED_BEFORE_FETCH if is_untouched else ReleaseReason.FAILED

    def _count(self, failure: Failure, tokens: int) -> None:
        """Count failures without progress in between. An attempt that reached no engine does not count."""
        if tokens >= self._tokens_at_failure + _PROGRESS_TOKENS:
            self.num_failures = 0
        self._tokens_at_failure = tokens
        self.num_failures += failure is not Failure.UNREACHABLE

    def _count_break(self, replica: str, tokens: int) -> None:
        if self._broken is None:
            self._broken = BrokenEngines()
        self._broken.count(replica, tokens - self.tokens_at_start)

    @property
    def is_quarantined(self) -> bool:
        """Whether the request is barred from all engines because it has broken some."""
        return self._broken is not None and self._broken.is_quarantined

    def start_model(self) -> None:
        """Reset the attempts for another model."""
        self.num_failures, self.refusal = 0, None

    def may_resend(self) -> bool:
        """Count a request that was lost on a kept connection, as the engine may have run it. Returns whether to send it
        again, only after the first failure: later ones more probably mean that the engine has ended."""
        if self.num_failures or self.max_attempts == 1:
            return False
        self.num_failures = 1
        return True

    def may_confirm(self, is_whole: bool, has_alternative: bool, has_begun: bool) -> bool:
        """Whether another replica may be asked to confirm a refusal. `is_whole`: whether the attempt covers the whole
        request at one replica, from the prompt on."""
        may_retry = is_whole and has_alternative and not has_begun and self.refusal is None
        return may_retry and self.num_failures + 1 < self.max_attempts

    def waits_for_others(self, failure: Failure) -> bool:
        """Whether to wait until engines that were killed together are known to be down: a second one has just failed,
        and the next attempt may be the last."""
        return failure is Failure.BROKEN_OFF and self.num_failures > 0

    def client_error(self, replica: str) -> ApiError:
        """The client's error after the last attempt, which failed at `replica`."""
        if self._broken is not None and self._broken.is_quarantined:
            return self._broken.error()
        return client_error(replica, self.error)

    def or_refusal(self, error: ApiError | None) -> ApiError | RefusedError | None:
        """The client's error: `error`, or an earlier refusal that no other replica could confirm or avoid."""
        return error if self.refusal is None else self.refusal[1]


def error_of_end(outcome: Outcome, is_cut_off: bool) -> ApiError | None:
    """The client's error for a request that control has ended, unless it was rejected. `is_cut_off`: the gateway
    ends."""
    if outcome is Outcome.FINISHED:
        return None
    if is_cut_off:
        return ApiError(503, "the gateway is shutting down", "shutting_down", retry_after_s=1)
    return ApiError(504, "the request took too long", "timeout")


def reason_here(reason: ReleaseReason, is_moving: bool) -> ReleaseReason:
    """A worker's release reason, corrected by the scheduler's knowledge: a move that has begun takes precedence, and a
    reason that is impossible in the request's state means that the request has ended."""
    if is_moving and reason in RESUMES:
        return ReleaseReason.MOVED
    return ReleaseReason.CANCELLED if reason in (ReleaseReason.MOVED, ReleaseReason.ACKNOWLEDGED) else reason
