"""The checks of cascade policies pass a sound policy and catch broken ones."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headway.testing import BrokenPolicyError, cascade_reads, check_cascade


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


@pytest.mark.ci
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
