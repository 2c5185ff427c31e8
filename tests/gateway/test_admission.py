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
from headway.gateway.scheduling.in_flight import InFlightRequest
from headway.gateway.telemetry.recording import Recording

pytest.importorskip("httptools")
SMALL, LARGE = "qwen3-8b", "llama-3.1-8b"
CASCADE = {
    "models": [SMALL, LARGE], "name": "best", "policy": {"name": "thresholds", "thresholds": 60.0},
    "judge": {"by": "confidence"},
}  # fmt: skip


def admitted(folder: Path, gateway: dict[str, Any], *max_tokens: int) -> list[InFlightRequest]:
    """Ask a gateway without running engines for chats with the model "best", and this limit each."""
    pools = [
        {"name": model, "model": model, "gpu": "h100", "engine": "vllm-v1", "endpoints": ["http://127.0.0.1:1"]}
        for model in (SMALL, LARGE)
    ]
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": pools, "cascade": CASCADE, "gateway": gateway}))
    plan = serving.load(path)[1]

    async def ask() -> list[InFlightRequest]:
        made, found = Gateway(plan, Recording(enabled=False)), []
        for num in max_tokens:
            body = {"model": "best", "messages": [{"role": "user", "content": "hello"}], "max_tokens": num}
            features = read_request(CHAT, json.dumps(body).encode(), {}).features(0.0)
            caller = made.keys.caller_of("")
            found.append(made.admission.admit(features, lambda live: InFlightRequest(live, "id"), caller))
        return found

    return asyncio.run(ask())


def test_a_cascade_refuses_what_none_of_its_models_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        admitted(tmp_path, {}, 10_000_000)
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")


def test_a_cascade_refuses_what_its_queue_has_no_room_for(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as refused:
        admitted(tmp_path, {"max_held": 1}, 10, 10)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")


def test_a_cascade_is_served_where_engines_with_queues_are_passed_over(tmp_path: Path) -> None:
    assert [each.live.model for each in admitted(tmp_path, {"max_waiting": 5}, 10)] == [SMALL]
