"""The checks of admission policies pass a sound policy and catch broken ones."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Release
from headway.testing import BrokenPolicyError, admission_reads, check_admission


class LateTiers:
    """Sound: all but tier 0 are kept, and go one by one."""

    interval_s: Any = 5.0

    def holds(self, request: Any) -> Any:
        return request.tier > 0

    def release(self, view: Any) -> Any:
        return [Release(request.id, 1) for request in list(view.held)[:1]]


class NoInterval(LateTiers):
    interval_s = None


class HoldsATruth(LateTiers):
    def holds(self, request: Any) -> Any:
        return request.tier


class ReleasesStrangers(LateTiers):
    def release(self, view: Any) -> Any:
        return [Release(10**9)] if view.held else []


class ReleasesTwice(LateTiers):
    def release(self, view: Any) -> Any:
        return 2 * [Release(request.id) for request in view.held]


class ReleasesTheGone(LateTiers):
    """As one that keeps books of its own, and does not see that requests give up."""

    def __init__(self) -> None:
        self.books: list[int] = []

    def holds(self, request: Any) -> Any:
        self.books.append(request.id)
        return True

    def release(self, view: Any) -> Any:
        going, self.books = [Release(id) for id in self.books[:-3]], self.books[-3:]
        return going


class SaysIds(LateTiers):
    def release(self, view: Any) -> Any:
        return [request.id for request in view.held]


class BelowTheTop(LateTiers):
    def release(self, view: Any) -> Any:
        return [Release(request.id, -1) for request in view.held]


class SendsNowhere(LateTiers):
    def release(self, view: Any) -> Any:
        return [Release(request.id, region="atlantis") for request in view.held]


class KeepsAll(LateTiers):
    def release(self, view: Any) -> Any:
        return ()


class Counts(LateTiers):
    calls: list[int] = []  # noqa: RUF012 - the mistake that the check is for

    def release(self, view: Any) -> Any:
        self.calls.append(1)
        return super().release(view) if len(self.calls) % 7 else []


class Forgets(LateTiers):
    count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": 0}

    def release(self, view: Any) -> Any:
        self.count += 1
        return super().release(view) if self.count % 7 else []


class KeepsARequest(LateTiers):
    def holds(self, request: Any) -> Any:
        self.kept = request
        return False


class KeepsTheHeld(LateTiers):
    def release(self, view: Any) -> Any:
        self.kept = list(view.held)
        return super().release(view)


class EmptiesTheLine(LateTiers):
    def release(self, view: Any) -> Any:
        released = super().release(view)
        view.held.clear()
        return released


class KnowsLengths(LateTiers):
    def holds(self, request: Any) -> Any:
        return request.output_tokens > 100


class LooksAtTheClock(LateTiers):
    def release(self, view: Any) -> Any:
        return super().release(view) if time.time() > 0 else None


class Dice(LateTiers):
    def holds(self, request: Any) -> Any:
        return Random().random() < 0.5


def test_a_sound_admission_passes() -> None:
    check_admission(LateTiers)
    assert {"request.tier", "admission.held"} <= admission_reads(LateTiers)


@pytest.mark.parametrize(
    ("admission", "says"),
    [
        (NoInterval, "interval_s is None"),
        (HoldsATruth, "must be True or False"),
        (ReleasesStrangers, "which it does not hold"),
        (ReleasesTwice, "which it does not hold"),
        (ReleasesTheGone, "which it does not hold"),
        (SaysIds, "returns Releases"),
        (BelowTheTop, "as of tier -1"),
        (SendsNowhere, "to region .atlantis., which has no replica"),
        (KeepsAll, "for ever"),
        (Counts, "decided differently"),
        (Forgets, "some of its state was lost"),
        (KeepsARequest, "with a request view in it|kept a view"),
        (KeepsTheHeld, "may not keep a view|kept a view|view in it"),
        (EmptiesTheLine, "changed view.held"),
        (KnowsLengths, "request.output_tokens, which only"),
        (LooksAtTheClock, "used time.time"),
        (Dice, "without a seed|decided differently"),
    ],
)
def test_a_broken_admission_is_caught(admission: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_admission(admission)
