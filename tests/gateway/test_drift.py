"""An emulated engine slowed to half, beside one that is not: the gateway tells which one its model does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import serving
from serving import chat, metric, send, until

KEY = "of the tests"


@pytest.mark.ci
def test_a_replica_half_as_fast_as_predicted_is_told(tmp_path: Path) -> None:
    engines = [serving.emulator("--output-tokens", "40"), serving.emulator("--output-tokens", "40", "--speed", "0.5")]
    gateway = {"admin_keys": [sha256(KEY.encode()).hexdigest()]}
    path = serving.fleet_file(
        tmp_path, [engine.url for engine in engines], gateway=gateway, policies={"routing": "round-robin"}
    )
    with serving.up(serving.gateway(path), 2, *engines) as front:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: list(chat(front, f"{i} {'word ' * 100}", stream=True).events()), range(80)))

        def predictions() -> list[Any]:
            replicas = send(front, "/workers", headers={"authorization": f"Bearer {KEY}"}).json()["data"]
            return [replica["prediction"] for replica in replicas]

        until(lambda: None not in predictions())
        full, half = predictions()
        assert half["itl"] < 0.75 * full["itl"]
        assert half["itl"] < 0.6
        assert "headway calibrate RECORDS" in half["correction"] and "coefficients: pool.json" in half["correction"]
        assert metric(front, "headway_prediction_ratio") > 0
