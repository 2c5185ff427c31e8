"""The checks of admission and cascade policies: registered ones hold to them, and broken ones are caught."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest

from headway.core.decision import Release
from headway.testing.conformance_admission import admission_reads, check_admission
from headway.testing.conformance_cascade import cascade_reads, check_cascade
from headway.testing.strict_views import BrokenPolicyError

# Admission.


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
        (ReleasesStrangers, "which it does not keep"),
        (ReleasesTwice, "which it does not keep"),
        (ReleasesTheGone, "which it does not keep"),
        (SaysIds, "returns Releases"),
        (BelowTheTop, "as of tier -1"),
        (SendsNowhere, "to region .atlantis., where no replica is"),
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


# Cascades.


class HalfWay:
    """Sound: from the first model on, until an answer is worth 50."""

    def enter(self, request: Any, view: Any) -> Any:
        return min(view.stage, len(view.stages) - 1)

    def accept(self, request: Any, score: Any, view: Any) -> Any:
        return score >= 50


class EntersBeyond(HalfWay):
    def enter(self, request: Any, view: Any) -> Any:
        return len(view.stages)


class EntersByName(HalfWay):
    def enter(self, request: Any, view: Any) -> Any:
        return view.stages[0].model


class AcceptsByDegrees(HalfWay):
    def accept(self, request: Any, score: Any, view: Any) -> Any:
        return score


class Tires(HalfWay):
    calls: list[int] = []  # noqa: RUF012 - the mistake that the check is for

    def accept(self, request: Any, score: Any, view: Any) -> Any:
        self.calls.append(1)
        return len(self.calls) % 7 == 0


class LosesCount(HalfWay):
    count = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": 0}

    def accept(self, request: Any, score: Any, view: Any) -> Any:
        self.count += 1
        return self.count % 7 == 0


class KeepsAStage(HalfWay):
    def enter(self, request: Any, view: Any) -> Any:
        self.first = view.stages[0]
        return 0


class DropsAStage(HalfWay):
    def accept(self, request: Any, score: Any, view: Any) -> Any:
        view.stages.reverse()
        return True


class KnowsQuality(HalfWay):
    def enter(self, request: Any, view: Any) -> Any:
        return int(bool(request.quality))


class AsksTheTime(HalfWay):
    def enter(self, request: Any, view: Any) -> Any:
        return int(time.time() < 0)


def test_a_sound_cascade_passes() -> None:
    check_cascade(HalfWay)
    assert cascade_reads(HalfWay) == {"cascade.stage", "cascade.stages"}


@pytest.mark.parametrize(
    ("cascade", "says"),
    [
        (EntersBeyond, "it may be 0 to"),
        (EntersByName, "enters at stage 'm'"),
        (AcceptsByDegrees, "must be True or False"),
        (Tires, "decided differently"),
        (LosesCount, "some of its state was lost"),
        (KeepsAStage, "view in it|kept a view"),
        (DropsAStage, "changed view.stages"),
        (KnowsQuality, "request.quality, which only"),
        (AsksTheTime, "used time.time"),
    ],
)
def test_a_broken_cascade_is_caught(cascade: Any, says: str) -> None:
    with pytest.raises(BrokenPolicyError, match=says):
        check_cascade(cascade)
