"""Every policy of Headway runs in front of engines, or is refused: oracles, and orderings without their inputs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

import serving

pytest.importorskip("httptools")

from starlette.types import Message

from headway import serving as composition
from headway.core.errors import HeadwayError
from headway.gateway.fleet.specs import ServingPlan
from headway.gateway.gateway import Gateway
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
from headway.gateway.relay.writer import AsgiWriter
from headway.gateway.telemetry.recording import Recording
from headway.policies import ADMISSIONS, MIGRATIONS, ORDERINGS, ROUTERS

HELD = {"ordering_at": "gateway", "window": 2}
POLICIES: list[dict[str, Any]] = [
    *({"routing": name} for name in ROUTERS),
    *({"ordering": name, **HELD} for name in ORDERINGS),
    *({"ordering": name, "preempt_every_s": 0.05, **HELD} for name in ("pascal", "tiers-and-phases", "priority")),
    *({"migration": name} for name in MIGRATIONS),
    *({"admission": name} for name in ADMISSIONS),
    {"routing": "pascal", "ordering": "pascal", "migration": "pascal", **HELD},
]
ORACLES = {
    name
    for kind in (ROUTERS, ORDERINGS, MIGRATIONS, ADMISSIONS)
    for name, made_by in kind.items()
    if getattr(made_by, "oracle", False)
}

BY_PROGRESS = {"round-robin", "fewest-quanta", "pascal", "tiers-and-phases"}
"""Orderings by what a request has generated, which is nothing while it waits at the gateway."""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[serving.Process]]:
    made = [serving.emulator("--reasoning-tokens", "20", "--speed", "10") for _ in range(2)]
    with serving.closing(*made):
        yield made


async def _nobody() -> Message:
    return {"type": "http.disconnect"}


async def _one(gateway: Gateway, i: int) -> bytes:
    """A stream, from the first byte to the last."""
    body = {"model": serving.MODEL, "messages": [{"role": "user", "content": "word " * 40}], "max_tokens": 60}
    headers = {"x-headway-tier": str(i % 3), "x-session-id": str(i)}
    answers: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        answers.append(message.get("body", b""))

    asked = read_request(CHAT, json.dumps({**body, "stream": True}).encode(), headers)
    caller = gateway.keys.caller_of("")
    await gateway.relay(asked, caller, AsgiWriter(_nobody, send), f"id-{i}").run()
    return b"".join(answers)


async def _serve(plan: ServingPlan) -> list[bytes]:
    """Eight streams at once."""
    gateway = Gateway(plan, Recording(enabled=False))
    gateway.start()
    try:
        async with asyncio.timeout(serving.PATIENCE_S):
            while gateway.num_up < 2:
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*(_one(gateway, i) for i in range(8)))
        assert not gateway.driver.requests and not any(replica.num_in_flight for replica in gateway.replicas)
        return answers
    finally:
        await gateway.stop()


@pytest.mark.parametrize("policies", POLICIES, ids=lambda policies: "-".join(map(str, policies.values())))
def test_every_policy_is_served_or_refused(
    engines: list[serving.Process], tmp_path: Path, policies: dict[str, Any]
) -> None:
    path = serving.fleet_file(tmp_path, [engine.url for engine in engines], policies=policies)
    if ORACLES & {str(value) for value in policies.values()}:
        with pytest.raises(HeadwayError, match="only a simulation knows"):
            composition.load(path)
        return
    if policies.get("ordering") in BY_PROGRESS and not policies.keys() & {"migration", "preempt_every_s"}:
        with pytest.raises(HeadwayError, match="orders by the tokens that a request has so far"):
            composition.load(path)
        return
    _, plan = composition.load(path)
    answers = asyncio.run(_serve(plan))
    assert len(answers) == 8
    for stream in answers:
        assert stream.endswith(b"data: [DONE]\n\n") and b'"error"' not in stream
        assert stream.count(b'"finish_reason":"length"') == 1
