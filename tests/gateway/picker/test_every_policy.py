"""Each policy decides for the picker as for the gateway: for the same arrivals, one by one, the same choices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

from ext_proc import CHAT, Desk, desk, picked
from headway.control.decisions import Decision
from headway.gateway import clock
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from picker_days import POLICIES
from serving import fleet_file

URLS = [f"http://127.0.0.1:{port}" for port in range(9001, 9005)]
NUM_REQUESTS = 12


def body(i: int) -> dict[str, Any]:
    words = f"{i % 3} " + "word " * (100 * (i % 4))
    return {**CHAT, "messages": [{"role": "user", "content": words}], "max_tokens": 1 + 10 * (i % 5), "priority": i % 3}


def headers(i: int) -> dict[str, str]:
    return {"x-session-id": f"{i % 5}"}


async def by_gateway(made: Desk, i: int) -> None:
    request = read_request("/v1/chat/completions", msgspec.json.encode(body(i)), headers(i))
    gateway = made.gateway
    features = await gateway.admission.features(request)
    gateway.admission.admit(
        features, lambda live: InFlightRequest(live, "id", is_streamed=False), gateway.keys.caller_of("")
    )


async def by_picker(made: Desk, i: int) -> None:
    call, num_known = made.call(), len(made.gateway.driver.requests)
    call.request(body(i), headers(i))
    while len(made.gateway.driver.requests) == num_known:
        await asyncio.sleep(0)
    (request,) = [each for each in made.gateway.driver.requests.values() if each.live.id == i]
    if request.reservation is not None:
        await picked(call)


def choices(path: Path, ask: Any) -> list[Any]:
    """What is decided on requests of which some end while others come."""
    log: list[Decision] = []

    async def run() -> None:
        async with desk(path, log) as made:
            for i in range(NUM_REQUESTS):
                await ask(made, i)
                request = made.gateway.driver.requests.get(i - 4)
                if request is not None and request.reservation is not None:
                    made.gateway.driver.release(request, ReleaseReason.FINISHED)

    asyncio.run(run())
    return [(each.what, each.choice, each.tier) for each in log]


@pytest.mark.parametrize("policies", POLICIES, ids=lambda value: "-".join(map(str, value.values())))
def test_decisions_are_those_of_the_gateway(
    policies: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "monotonic", lambda: 1.0)  # policies that read the time see the same one
    path = fleet_file(tmp_path, URLS, policies=policies)
    made = choices(path, by_picker)
    assert made == choices(path, by_gateway)
    assert made or "admission" in policies
