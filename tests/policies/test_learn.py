"""Policies of every kind hear of every request that ends."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.record import Ended
from headway.policies.migration.llumnix import LlumnixMigration
from headway.policies.routing.round_robin import RoundRobinRouter
from simulation import Breathing, Patient, Scenario, pool, request

HEARD: list[int] = []


class _Hears:
    def learn(self, record: Ended) -> None:
        HEARD.append(record.id)


class Router(_Hears, RoundRobinRouter): ...


class Migration(_Hears, LlumnixMigration): ...


class Scaler(_Hears, Breathing): ...


class Admission(_Hears, Patient): ...


@pytest.mark.parametrize("kind", [Router, Migration, Scaler, Admission])
def test_every_kind_of_policy_hears_of_every_end(kind: type[Any]) -> None:
    HEARD.clear()
    requests = tuple(request(i, 0.5 * i, 10, 20, tier=3 * (i % 2)) for i in range(12))
    given: dict[str, Any] = {kind.__name__.lower(): kind}
    Scenario(requests, (pool("a", max_replicas=3),), **given).play()
    assert sorted(HEARD) == list(range(12))
