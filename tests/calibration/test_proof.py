"""A user's own proof on a real engine: calibrate on half of its runs, and predict the other half.

llama.cpp serves a model of random weights on a processor that no catalog knows; a client of these tests writes what
`vllm bench serve --save-detailed` writes. HEADWAY_QUIET promises a processor for the engine alone: loads are longer
then, engine and client have cores of their own, and the prediction must be within 10%. Elsewhere it must only be much
better than without the runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

import bench_llama
import serving
from bench_client import Load, run
from engines import NO_LLAMA
from headway.cli import main

pytestmark = pytest.mark.skipif(NO_LLAMA, reason="pip install xllamacpp gguf")

QUIET = "HEADWAY_QUIET" in os.environ
LENGTHS: dict[str, Any] = {"prompt_tokens": (16, 128 if QUIET else 64), "output_tokens": (12, 32 if QUIET else 16)}
SHORT: tuple[dict[str, Any], ...] = (
    {"num": 3, "concurrency": 1}, {"num": 6, "concurrency": 2}, {"num": 8, "concurrency": 4},
    {"num": 6, "rate_rps": 4.0},
)  # fmt: skip
LONG: tuple[dict[str, Any], ...] = (
    {"num": 10, "concurrency": 1}, {"num": 14, "concurrency": 2}, {"num": 22, "concurrency": 4},
    {"num": 16, "rate_rps": 2.5}, {"num": 20, "rate_rps": 4.0},
)  # fmt: skip
LOADS = LONG if QUIET else SHORT
TRIES = 5
GPU = {
    "name": "this-cpu", "like": "l4", "memory_bytes": 4e9, "bandwidth_bytes_per_s": 20e9, "peak_flops": {"bf16": 100e9}
}  # fmt: skip
"""Round numbers of a processor's datasheet; runs tell what it reaches of them."""


@contextmanager
def cores_of_their_own(engine: int) -> Iterator[None]:
    """Keep the engine on the last core and this process off it, if a core is promised."""
    before = os.sched_getaffinity(0) if QUIET and hasattr(os, "sched_setaffinity") else set()
    if len(before) < 2:
        yield
        return
    last = max(before)
    for thread in Path(f"/proc/{engine}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {last})
    os.sched_setaffinity(0, before - {last})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def engine() -> Iterator[serving.Process]:
    made = serving.Process(bench_llama.__file__, "0")
    with serving.closing(made), cores_of_their_own(made.process.pid):
        yield made


@pytest.fixture(scope="module")
def folder(engine: serving.Process, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of each load, one after the other, so that what else the machine does meets both halves."""
    place = tmp_path_factory.mktemp("proof")
    bench_llama.write_config(place / "config.json")
    (place / "cpu.yaml").write_text(yaml.safe_dump(GPU))
    run(engine.url, "bench", Load(4, (16, 128), (12, 32), concurrency=2, seed=99), bench_llama.TOKEN_IDS)
    for i, load in enumerate(LOADS):
        for name, found in zip(("known", "unseen"), _halves(engine, i, load), strict=True):
            (place / f"{name}-{i}.json").write_text(json.dumps({**found, "max_num_seqs": 4}))
    return place


def _halves(engine: serving.Process, number: int, load: dict[str, Any]) -> list[dict[str, Any]]:
    """Two runs of a load. Where one took twice the other's time a token, the machine stood still in it, which no fit
    can know of: they are run again."""
    for _ in range(TRIES):
        loads = [Load(seed=2 * number + half, **LENGTHS, **load) for half in range(2)]
        found = [run(engine.url, "bench", each, bench_llama.TOKEN_IDS) for each in loads]
        assert not any(each["failed"] for each in found)
        low, high = sorted(each["mean_itl_ms"] for each in found)
        if high < 2 * low:
            break
    return found


def options(folder: Path) -> list[str]:
    return [
        "--gpu-file", str(folder / "cpu.yaml"), "--gpu", "this-cpu", "--engine", "llama.cpp", "--model-config",
        str(folder / "config.json"), "--no-progress", "--json",
    ]  # fmt: skip


def errors(folder: Path, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, float]:
    """Mean absolute errors on the runs that no fit has seen, in percent."""
    unseen = [str(path) for path in sorted(folder.glob("unseen-*.json"))]
    assert main(["validate", *unseen, *options(folder), *args]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["overall"]
    return found


def test_runs_that_were_not_seen_are_predicted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = [str(path) for path in sorted(folder.glob("known-*.json"))]
    out = str(folder / "this-cpu.json")
    before = errors(folder, capsys)
    assert main(["calibrate", *known, *options(folder), "--out", out, "--source", "this test"]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    after = errors(folder, capsys, "--coefficients", out)
    changes = ", ".join(
        f"{key} {before[key]:.1f}% -> {after[key]:.1f}%" for key in ("e2e_mean", "itl_mean", "ttft_mean")
    )
    with capsys.disabled():
        sys.stdout.write(f"\nruns that no fit has seen: {changes}; left out in turn: {fit['held_out']}\n")
    assert all(after[key] < before[key] * 2 / 3 for key in ("e2e_mean", "itl_mean"))
    if QUIET:
        assert after["e2e_mean"] <= 10 and after["itl_mean"] <= 10


def test_the_coefficients_are_used_by_simulate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a fleet file, beside the GPU of the user's own."""
    scenario = {
        "workload": {"num_requests": 30, "arrivals": 2.0, "prompt_tokens": 70, "output_tokens": 20}, "gpus": [GPU],
        "fleet": [{
            "model": {"config": "config.json"}, "gpu": "this-cpu", "engine": "llama.cpp",
            "coefficients": "this-cpu.json",
        }],
    }  # fmt: skip
    (folder / "fleet.yaml").write_text(yaml.safe_dump(scenario))
    assert main(["simulate", str(folder / "fleet.yaml"), "--json"]) == 0
    calibrated_s = json.loads(capsys.readouterr().out)["results"][0]["metrics"]["tpot_s.mean"]
    del scenario["fleet"][0]["coefficients"]  # type: ignore[attr-defined]
    (folder / "fleet.yaml").write_text(yaml.safe_dump(scenario))
    assert main(["simulate", str(folder / "fleet.yaml"), "--json"]) == 0
    assert calibrated_s > 1.3 * json.loads(capsys.readouterr().out)["results"][0]["metrics"]["tpot_s.mean"]


def test_neighbouring_slots_share_a_pass(tmp_path: Path) -> None:
    """What `passes_by_slot` says, by the engine's own words. Slots that are apart take two passes."""
    environment = {**os.environ, "LLAMA_BATCH_DEBUG": "2"}
    command = [sys.executable, bench_llama.__file__, "0"]
    log = tmp_path / "log"

    def generate(url: str, slot: int) -> None:
        prompt = [bench_llama.TOKEN_IDS[0] + slot] * 4
        body = {"prompt": prompt, "n_predict": 64, "ignore_eos": True, "cache_prompt": False, "id_slot": slot}
        headers = {"content-type": "application/json"}
        with urlopen(Request(f"{url}/completion", json.dumps(body).encode(), headers)) as answer:
            answer.read()

    with log.open("wb") as file, Popen(command, stdout=PIPE, stderr=file, env=environment) as engine:
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().decode().split()[-1]

            def passes(*slots: int) -> list[str]:
                """The sequences of each pass while these slots generate at once."""
                before = log.stat().st_size
                with ThreadPoolExecutor(len(slots)) as pool:
                    list(pool.map(generate, len(slots) * [url], slots))
                added = r"added ubatch.*?seq_id_unq = \[ ([\d ]*) \]"
                return re.findall(added, log.read_bytes()[before:].decode(), re.DOTALL)

            assert "0 1" in passes(0, 1) and "2 3" in passes(2, 3)
            apart = passes(0, 2)
            assert set(apart) == {"0", "2"}
            assert sum(one != other for one, other in pairwise(apart)) > 2, "they generated at the same time"
        finally:
            engine.kill()
