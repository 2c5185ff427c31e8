"""Scaling of pairs of single-phase SGLang engines, as processes and as pods."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube
import processes
import serving
from processes import running
from serving import MODEL, all_up, chat, metric, send, until

pytest.importorskip("httptools")
SCALING = {"name": "combos", "local_window_s": 1, "global_window_s": 600, "grace_s": 0.5, "interval_s": 0.2}
PORT = ("--disaggregation-bootstrap-port", "0")


def _file(folder: Path, hows: dict[str, dict[str, Any]]) -> Path:
    """One combo at first, and at most two; `hows`: how each side is started."""
    side = {"model": MODEL, "gpu": "h100", "engine": "sglang"}
    combo = {
        "name": "pair",
        "goodput_rps": 1.0,
        "max_replicas": 2,
        **{part: {**side, **how} for part, how in hows.items()},
    }
    path = folder / "fleet.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "combos": [combo],
                "policies": {"routing": {"name": "cauchy", "within": "strict"}, "scaling": SCALING},
                "gateway": {"scrape_period_s": 0.1, "hold_s": 60},
            }
        )
    )
    return path


Kill = Callable[[], None]


@contextmanager
def _here(folder: Path) -> Iterator[tuple[Path, Kill]]:
    first, last = processes.ports(4)

    def how(part: str, ports: list[int]) -> dict[str, Any]:
        options = ("--engine", "sglang", "--disaggregation-mode", "{role}")
        return {"processes": processes.how(ports, *options, "--disaggregation-bootstrap-port", "{bootstrap_port}")}

    def kill() -> None:
        os.kill(min(running(first, last).items())[1], signal.SIGKILL)

    sides = {"prefill": [first, first + 1], "decode": [first + 2, last]}
    yield _file(folder, {part: how(part, ports) for part, ports in sides.items()}), kill
    until(lambda: not running(first, last))


@contextmanager
def _there(folder: Path) -> Iterator[tuple[Path, Kill]]:
    port, _ = processes.ports(1)
    made: dict[str, kube.Workload] = {}
    for i, part in enumerate(("prefill", "decode")):
        options = ("--engine", "sglang", "--disaggregation-mode", part, *PORT)
        made[part] = kube.Workload("Deployment", 1, port, part, i + 3, options)
    hows = {part: {"name": part, "namespace": "models", "port": port, "poll_s": 0.1} for part in made}

    def kill() -> None:
        made["prefill"].remove(made["prefill"].pods[0])
        made["prefill"].reconcile()

    with kube.serve(folder / "kubeconfig", *made.values()):
        yield _file(folder, {part: {"kubernetes": how} for part, how in hows.items()}), kill


@pytest.mark.ci
@pytest.mark.parametrize("way", [_here, _there])
def test_pairs_scale_with_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Path], Any]) -> None:
    """One that loses a half is out until that is there again."""
    if way is _there:
        pytest.importorskip("kubernetes")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with way(tmp_path) as (path, kill):
        front = serving.gateway(path)
        with serving.closing(front):
            all_up(front, 2)

            def busy() -> bool:
                replies = [chat(front, "hello " * 50, stream=True, max_tokens=5) for _ in range(3)]
                names = {reply.headers["x-headway-replica"] for reply in replies}
                assert all(serving.answer_text(list(reply.events())) for reply in replies)
                assert all(name.startswith("pair-decode/") for name in names)
                return len(names) == 2

            until(busy, 60)
            assert send(front, "/health").json()["up"] == 4
            kill()
            until(lambda: busy() and send(front, "/health").json()["up"] == 4, 60)
            until(lambda: send(front, "/health").json() == {"status": "ok", "up": 2, "replicas": 2}, 60)
            reply = chat(front, "hello " * 50, max_tokens=5)
            assert reply.json()["usage"]["completion_tokens"] == 5
            until(lambda: metric(front, "headway_requests_in_flight") == 0)
            assert "Traceback" not in front.stop()
