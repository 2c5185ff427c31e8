"""What a request needs to be admitted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headway import serving
from headway.gateway.errors import ApiError
from headway.gateway.gateway import Gateway
from headway.gateway.relay.request import CHAT
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling.in_flight import InFlightRequest, ReleaseReason
from headway.gateway.telemetry.recording import Recording

pytest.importorskip("httptools")
SMALL, LARGE = "qwen3-8b", "llama-3.1-8b"
CASCADE = {
    "models": [SMALL, LARGE],
    "name": "best",
    "policy": {"name": "thresholds", "thresholds": 60.0},
    "judge": {"by": "confidence"},
}


def asked(
    folder: Path, gateway: dict[str, Any], *max_tokens: int, recording: Recording | None = None, **of_small: Any
) -> tuple[Gateway, list[InFlightRequest]]:
    """Ask a gateway without running engines for chats with the model "best", and this limit each; then cancel them.

    `of_small`: keys of the first model's pool.
    """
    pools: list[dict[str, Any]] = [
        {"name": model, "model": model, "gpu": "h100", "engine": "vllm-v1", "endpoints": ["http://127.0.0.1:1"]}
        for model in (SMALL, LARGE)
    ]
    pools[0] |= of_small
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": pools, "cascade": CASCADE, "gateway": gateway}))
    plan = serving.load(path)[1]

    async def ask() -> tuple[Gateway, list[InFlightRequest]]:
        made, found = Gateway(plan, recording or Recording(enabled=False)), []
        for num in max_tokens:
            body = {"model": "best", "messages": [{"role": "user", "content": "hello"}], "max_tokens": num}
            features = read_request(CHAT, json.dumps(body).encode(), {}).features(0.0)
            caller = made.keys.caller_of("")
            found.append(made.admission.admit(features, lambda live: InFlightRequest(live, "id"), caller))
        for request in found:
            made.driver.release(request, ReleaseReason.CANCELLED)
        return made, found

    return asyncio.run(ask())


def test_a_cascade_refuses_what_none_of_its_models_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        asked(tmp_path, {}, 10_000_000)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


def test_a_cascade_refuses_what_its_queue_has_no_room_for(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        asked(tmp_path, {"max_held": 1}, 10, 10)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")


def test_a_cascade_is_served_where_engines_with_queues_are_passed_over(tmp_path: Path) -> None:
    assert [each.live.model for each in asked(tmp_path, {"max_waiting": 5}, 10)[1]] == [SMALL]


def test_a_cascades_requests_are_recorded_under_its_name_beside_adapters(tmp_path: Path) -> None:
    made, _ = asked(tmp_path, {}, 10, recording=Recording(enabled=True), lora={"adapters": [{"name": "sql"}]})
    records = made.telemetry.records()
    assert made.models.names() == [SMALL, LARGE, "best", "sql"]
    assert [records.models[code] for code in records.workload["model"]] == ["best"]
