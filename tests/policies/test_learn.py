"""Policies of every kind learn from every ended request."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.record import Ended
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.routing.round_robin import RoundRobinRouter
from simulation import Breathing, Patient, Scenario, pool, request

LEARNED: list[int] = []


class _RecordsEnds:
    def learn(self, record: Ended) -> None:
        LEARNED.append(record.id)


class Router(_RecordsEnds, RoundRobinRouter): ...


class Migration(_RecordsEnds, LlumnixMigration): ...


class Scaler(_RecordsEnds, Breathing): ...


class Admission(_RecordsEnds, Patient): ...


@pytest.mark.parametrize("kind", [Router, Migration, Scaler, Admission])
def test_every_kind_of_policy_learns_from_every_ended_request(kind: type[Any]) -> None:
    LEARNED.clear()
    requests = tuple(request(i, 0.5 * i, 10, 20, tier=3 * (i % 2)) for i in range(12))
    given: dict[str, Any] = {kind.__name__.lower(): kind}
    Scenario(requests, (pool("a", max_replicas=3),), **given).play()
    assert sorted(LEARNED) == list(range(12))
