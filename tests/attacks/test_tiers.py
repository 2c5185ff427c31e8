"""Requests of every tier that a client can name: answers about them stay small, and quick to make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

pytest.importorskip("httptools")

from attacking import longest_turn_s, turn_is_short
from gateway_in_process import Inside
from serving import MODEL

NUM_TIERS = 2000
MIB = 1 << 20


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    folder = tmp_path_factory.mktemp("fleet")
    made = Inside(folder, gateway={"scrape_period_s": 3600.0, "dashboard": "open"})
    made.engines[0].keeps_bodies = False
    made.run(_all_tiers(made))
    yield made
    made.close()


async def _all_tiers(inside: Inside) -> None:
    def body(tier: int) -> dict[str, object]:
        return {"model": MODEL, "priority": 16 * tier, "messages": [{"role": "user", "content": "a"}]}

    for first in range(0, NUM_TIERS, 50):
        await asyncio.gather(*(inside.post(body(tier)) for tier in range(first, first + 50)))


@pytest.mark.parametrize("path", ["/dashboard/data", "/metrics"])
def test_answers_about_tiers_are_short(inside: Inside, path: str) -> None:
    longest_s, (reply,) = inside.run(longest_turn_s([inside.post(b"", path, method="GET")]))
    assert reply.status == 200 and len(reply.body) < MIB and turn_is_short(longest_s)
    if path == "/dashboard/data":
        data = json.loads(reply.body)
        assert len(data["tiers"]) <= 100 and sum(tier["num"] for tier in data["tiers"]) == NUM_TIERS
