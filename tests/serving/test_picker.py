"""What an endpoint picker refuses at the start, with the reason and the place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("httptools")

from headway.core.errors import HeadwayError
from headway.serving import gateway, picker

POOL = {
    "name": "pool",
    "model": "qwen3-8b",
    "gpu": "h100",
    "engine": "vllm-0.15",
    "endpoints": ["http://10.0.0.1:8000"],
}
SLOTTED = {**POOL, "engine": "llama.cpp", "slots": "."}
HOSTED = {
    "name": "hosted",
    "model": "m",
    "hosted": {"ttft_s": 0.1, "tokens_per_s": 50},
    "endpoints": ["http://10.0.0.2:1"],
}
HELD = {"ordering_at": "gateway", "window": 2}
CASCADE = {"name": "both", "models": ["qwen3-8b", "llama-3.1-8b"], "policy": {"name": "thresholds", "thresholds": [50]}}


def refused(changes: dict[str, Any], folder: Path) -> str:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": [POOL], **changes}))
    with pytest.raises(HeadwayError) as caught:
        picker.check(gateway.read(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"policies": {"migration": "pascal"}}, "policies.migration: an endpoint picker cannot do it: a stream"),
        ({"policies": {"preempt_every_s": 0.1, "ordering": "pascal", **HELD}}, "policies.preempt_every_s"),
        ({"fleet": [POOL, {**POOL, "name": "b", "model": "llama-3.1-8b"}], "cascade": CASCADE}, "cascade: an endpoint"),
        ({"fleet": [{**POOL, "fallback": ["hosted"]}, HOSTED]}, "`fallback`: Envoy sends a request to endpoints of"),
        ({"fleet": [SLOTTED]}, "fleet[0].slots: an endpoint picker cannot do it"),
        ({"gateway": {"max_attempts": 2}}, "gateway.max_attempts: an endpoint picker cannot do it: Envoy's"),
        ({"gateway": {"pace_s": 0.1}}, "gateway.pace_s"),
        ({"gateway": {"batches": {}}}, "gateway.batches"),
        ({"gateway": {"tracing": True}}, "gateway.tracing"),
        ({"gateway": {"cors": {"origins": ["*"]}}}, "gateway.cors"),
        (
            {"fleet": [{**POOL, "endpoints": ["http://localhost:8000"]}]},
            "http://localhost:8000: Envoy is told IP addresses; expected one, such as http://127.0.0.1:8000",
        ),
        ({"fleet": [{**POOL, "endpoints": ["http://10.0.0.1:8000/v1"]}]}, "http://ADDRESS:PORT, without a path"),
        ({"fleet": [{**POOL, "endpoints": ["https://10.0.0.1:8000"]}]}, "expected http://ADDRESS:PORT"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(sorted(value)),
)
def test_what_needs_the_answers_way_through_headway_is_refused(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    message = refused(changes, tmp_path)
    assert text in message and "fleet.yaml:" in message and "\n" not in message


def test_a_fleet_of_addresses_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    fleet = [{**POOL, "endpoints": ["http://10.0.0.1:8000", "http://[fd00::1]:8000"]}]
    policies = {"ordering": "fair", **HELD}
    path.write_text(yaml.safe_dump({"fleet": fleet, "policies": policies}))
    picker.check(gateway.read(path))
