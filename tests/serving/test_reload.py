"""What of a fleet file may change while its gateway runs, and when the file counts as changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headway.core.errors import HeadwayError
from headway.gateway.gateway import Gateway
from headway.gateway.telemetry.recording import Recording
from headway.serving.reload import FleetFile
from keys import digest

pytest.importorskip("httptools")
POOL = {"name": "pool", "model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "endpoints": ["http://127.0.0.1:1"]}


def _write(path: Path, pool: dict[str, Any] | None = None, **sections: Any) -> None:
    path.write_text(yaml.safe_dump({"fleet": [POOL | (pool or {})], **sections}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    _write(tmp_path / "fleet.yaml")
    return tmp_path / "fleet.yaml"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"seed": 3}, "seed"),
        ({"pacer": {"tpot_s": 0.2}}, "pacer"),
        ({"gateway": {"hosts": ["a.example.com"]}}, "gateway.hosts"),
        ({"gateway": {"cors": {"origins": ["*"]}}}, "gateway.cors"),
        ({"gateway": {"api_keys": [digest("k")]}}, "gateway.api_keys"),
        ({"gateway": {"admin_keys": [digest("k")]}}, "gateway.admin_keys"),
        ({"gateway": {"hang_s": 3}}, "gateway.hang_s"),
        ({"gateway": {"batches": {"store": "b.sqlite"}}}, "gateway.batches"),
        ({"gpu_limits": [{"gpu": "h100", "count": 3}]}, "gpu_limits"),
        ({"pool": {"endpoints": [], "processes": {"command": ["true", "{port}"], "ports": [1, 2]}}}, "fleet"),
        ({"pool": {"kv_events": {"endpoint": "tcp://{host}:5557"}}}, r"fleet\[0\]\.kv_events"),
    ],
)
def test_what_needs_a_restart_is_refused_and_named(path: Path, changes: dict[str, Any], where: str) -> None:
    file = FleetFile(path, lambda read: read)
    _write(path, **changes)
    with pytest.raises(HeadwayError, match=rf"fleet\.yaml:\d+: {where}.*: cannot change while the gateway runs"):
        file.read_again(file.plan)
    _write(path)  # as before: the refused file is not what the next one is compared with
    assert file.read_again(file.plan).pools == file.plan.pools


def test_policies_that_are_the_same_keep_their_state(path: Path) -> None:
    _write(path, policies={"routing": {"name": "prefix-affinity"}, "ordering": "edf", "ordering_at": "gateway"})
    file = FleetFile(path, lambda read: read)
    _write(path, policies={"routing": {"name": "prefix-affinity"}, "ordering": "priority", "ordering_at": "gateway"})
    plan = file.read_again(file.plan)
    assert plan.policies.router is file.plan.policies.router
    assert plan.policies.ordering is not file.plan.policies.ordering


def test_a_secret_that_is_rotated_changes_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = path.with_name("key")
    secret.write_text("first")
    _write(path, {"api_key": "${file:key}"})
    file = FleetFile(path, lambda read: read)
    before = file.signature()
    assert before == file.signature() and file.plan.pools[0].api_key == "first"
    secret.write_text("second")
    assert file.signature() != before
    assert file.read_again(file.plan).pools[0].api_key == "second"
    path.unlink()
    assert file.signature() == ()


def test_a_fixed_fleet_is_what_it_was(path: Path) -> None:
    file = FleetFile(path, lambda read: read, is_fleet_fixed=True)
    _write(path, gateway={"timeout_s": 9})
    assert file.read_again(file.plan).settings.timeout_s == 9
    _write(path, {"endpoints": ["http://127.0.0.1:2"]})
    with pytest.raises(HeadwayError, match="cannot change"):
        file.read_again(file.plan)


STARTED = {"endpoints": [], "processes": {"command": ["true", "{port}"], "ports": [1, 9]}, "max_replicas": 3}


def _write_scaled(path: Path, scaling: Any) -> None:
    _write(path, STARTED, policies={"scaling": scaling})


def test_other_settings_of_a_scaler_hold_and_what_it_knows_stays(path: Path) -> None:
    """A pool that has just grown, and grows again after a cool-down alone, does not for other settings."""

    async def reloaded() -> None:
        gateway = Gateway(file.plan, Recording(enabled=False))
        control = gateway.scaling.control
        assert control is not None
        first: Any = control.scaler
        first._stepped_s["pool"] = 12.0
        _write_scaled(path, {"name": "freeness", "out_below": 0.2, "in_above": 0.9, "interval_s": 3, "cooldown_s": 60})
        changes = gateway.reconfigure(file.read_again(gateway.plan))
        (told,) = [each for each in changes if each.startswith("policies: scaling is freeness")]
        assert told.endswith("-> freeness(cooldown_s=60, in_above=0.9, interval_s=3, out_below=0.2)")
        second: Any = control.scaler
        assert second is not first and second._stepped_s == {"pool": 12.0} and second._out_below == 0.2
        assert control.interval_s == 3 and control in gateway.driver.control.parts.ticking()
        assert gateway.reconfigure(file.read_again(gateway.plan)) == [] and control.scaler is second

    _write_scaled(path, "freeness")
    file = FleetFile(path, lambda read: read)
    asyncio.run(reloaded())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("freeness", "keda"),
        ("minimum", "freeness"),
        ("freeness", None),
        (None, "freeness"),
        ({"name": "headway", "use": 0.5}, {"name": "headway", "use": 0.7, "batch_tier": 2}),
    ],
)
def test_another_scaler_and_what_it_counts_by_need_a_restart(path: Path, before: Any, after: Any) -> None:
    _write_scaled(path, before)
    file = FleetFile(path, lambda read: read)
    _write_scaled(path, after)
    with pytest.raises(HeadwayError, match=r"policies\.scaling.*: cannot change while the gateway runs"):
        file.read_again(file.plan)


def test_a_scaler_that_a_trial_changed_is_that_of_the_file_after_a_reload(path: Path) -> None:
    _write_scaled(path, {"name": "headway", "use": 0.5, "batch_tier": 2})
    file, tried = FleetFile(path, lambda read: read), path.with_name("tried.yaml")
    _write_scaled(tried, {"name": "headway", "use": 0.6, "batch_tier": 2})
    trial = file.policies_of(tried, file.plan)
    assert str(trial.scaler) == "headway(batch_tier=2, use=0.6)"
    again = file.read_again(msgspec.structs.replace(file.plan, policies=trial))
    assert str(again.policies.scaler) == "headway(batch_tier=2, use=0.5)"


def _write_combo(path: Path, goodput_rps: float, handover: str = "layerwise") -> None:
    command = {"command": ["true", "{port}"]}
    parts = {
        role: {"model": "qwen3-8b", "gpu": "h100", "engine": "vllm-0.15", "processes": {**command, "ports": ports}}
        for role, ports in (("prefill", [1, 2]), ("decode", [3, 4]))
    }
    combo = {"name": "pair", **parts, "goodput_rps": goodput_rps, "handover": {"mode": handover}}
    path.write_text(yaml.safe_dump({"combos": [combo], "policies": {"routing": "cauchy", "scaling": "combos"}}))


def test_combos_that_were_profiled_anew_serve_on_with_their_goodputs(path: Path) -> None:
    """The router's weights and the scaler's counts change; replicas stay."""

    async def reloaded() -> None:
        gateway = Gateway(file.plan, Recording(enabled=False))
        replicas = [gateway.fleet.create(served, f"http://127.0.0.1:{i}") for i, served in enumerate(file.plan.pools)]
        for replica in replicas:
            gateway.fleet.connect(replica)
        assert [replica.goodput_rps for replica in replicas] == [24.0, 24.0]
        _write_combo(path, 16.5)
        changes = gateway.reconfigure(file.read_again(gateway.plan))
        assert changes == ["combos: pair: goodput_rps is 24 -> 16.5"]
        assert [replica.goodput_rps for replica in gateway.replicas] == [16.5, 16.5] and not gateway.fleet.failed()
        assert gateway.scaling._states["pair"].goodput_rps == 16.5
        assert gateway.reconfigure(file.read_again(gateway.plan)) == []

    _write_combo(path, 24.0)
    file = FleetFile(path, lambda read: read)
    asyncio.run(reloaded())
    _write_combo(path, 16.5, "bulk")
    with pytest.raises(HeadwayError, match=r"combos.*cannot change"):
        file.read_again(file.plan)
