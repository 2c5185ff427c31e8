"""A prediction beside a real engine on this machine: calibrate on half of its runs, and predict the other half.

`make prove`, or `python bench/prove.py [--quiet-machine]`: llama.cpp serves a model of random weights on a processor
that no catalog knows; a client writes what `vllm bench serve --save-detailed` writes. On a quiet machine loads are
longer, and engine and client have cores of their own. Errors are printed: they depend on what else the machine does and
judge nothing. At last, which sequences share a pass of the engine, by its own words, which `passes_by_slot` says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from urllib.request import Request, urlopen

import yaml
from click import echo

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import bench_llama
import serving
from bench_client import Load, run

SHORT: tuple[dict[str, Any], ...] = (
    {"num": 3, "concurrency": 1}, {"num": 6, "concurrency": 2}, {"num": 8, "concurrency": 4},
    {"num": 6, "rate_rps": 4.0},
)  # fmt: skip
LONG: tuple[dict[str, Any], ...] = (
    {"num": 10, "concurrency": 1}, {"num": 14, "concurrency": 2}, {"num": 22, "concurrency": 4},
    {"num": 16, "rate_rps": 2.5}, {"num": 20, "rate_rps": 4.0},
)  # fmt: skip
TRIES = 5
GPU = {
    "name": "this-cpu", "like": "l4", "memory_bytes": 4e9, "bandwidth_bytes_per_s": 20e9, "peak_flops": {"bf16": 100e9}
}  # fmt: skip
"""Round numbers of a processor's datasheet; runs tell what it reaches of them."""


def main(is_quiet: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        bench_llama.write_config(place / "config.json")
        (place / "cpu.yaml").write_text(yaml.safe_dump(GPU))
        engine = serving.Process(bench_llama.__file__, "0")
        with serving.closing(engine), _cores_of_their_own(engine.process.pid, is_quiet):
            _measure(engine.url, place, is_quiet)
        known = [str(path) for path in sorted(place.glob("known-*.json"))]
        before = _errors(place)
        (fit,) = _headway("calibrate", *known, *_options(place), "--out", str(place / "fit.json"))["fits"]
        after = _errors(place, "--coefficients", str(place / "fit.json"))
        echo("mean absolute errors on runs that no fit has seen, before and after the calibration:")
        for key in ("e2e_mean", "itl_mean", "ttft_mean"):
            echo(f"  {key}: {before[key]:.1f}% -> {after[key]:.1f}%")
        echo(f"left out in turn: {fit['held_out']}")
        _passes(place / "log")


@contextmanager
def _cores_of_their_own(engine: int, is_quiet: bool) -> Iterator[None]:
    """Keep the engine on the last core and this process off it."""
    before = os.sched_getaffinity(0) if is_quiet and hasattr(os, "sched_setaffinity") else set()
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


def _measure(url: str, place: Path, is_quiet: bool) -> None:
    """Two runs of each load, one after the other, so that what else the machine does meets both halves."""
    run(url, "bench", Load(4, (16, 128), (12, 32), concurrency=2, seed=99), bench_llama.TOKEN_IDS)
    lengths: dict[str, Any] = {
        "prompt_tokens": (16, 128 if is_quiet else 64), "output_tokens": (12, 32 if is_quiet else 16)
    }  # fmt: skip
    for i, load in enumerate(LONG if is_quiet else SHORT):
        found = _halves(url, [Load(seed=2 * i + half, **lengths, **load) for half in range(2)])
        for name, each in zip(("known", "unseen"), found, strict=True):
            (place / f"{name}-{i}.json").write_text(json.dumps({**each, "max_num_seqs": 4}))


def _halves(url: str, loads: list[Load]) -> list[dict[str, Any]]:
    """Two runs. Where one took twice the other's time a token, the machine stood still in it: they are run again."""
    for _ in range(TRIES):
        found = [run(url, "bench", each, bench_llama.TOKEN_IDS) for each in loads]
        low, high = sorted(each["mean_itl_ms"] for each in found)
        if high < 2 * low:
            break
    return found


def _options(place: Path) -> list[str]:
    return [
        "--gpu-file", str(place / "cpu.yaml"), "--gpu", "this-cpu", "--engine", "llama.cpp", "--model-config",
        str(place / "config.json"), "--no-progress",
    ]  # fmt: skip


def _errors(place: Path, *args: str) -> dict[str, float]:
    """Mean absolute errors on the runs that no fit has seen, in percent."""
    unseen = [str(path) for path in sorted(place.glob("unseen-*.json"))]
    found: dict[str, float] = _headway("validate", *unseen, *_options(place), *args)["overall"]
    return found


def _headway(*args: str) -> Any:
    command = [sys.executable, "-m", "headway", *args, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _passes(log: Path) -> None:
    """Slots that are neighbours share a pass of llama.cpp; slots that are apart take two."""
    command = [sys.executable, bench_llama.__file__, "0"]
    environment = {**os.environ, "LLAMA_BATCH_DEBUG": "2"}
    with log.open("wb") as file, Popen(command, stdout=PIPE, stderr=file, env=environment) as engine:
        assert engine.stdout is not None
        try:
            url = engine.stdout.readline().decode().split()[-1]
            for slots in ((0, 1), (2, 3), (0, 2)):
                before = log.stat().st_size
                with ThreadPoolExecutor(len(slots)) as pool:
                    list(pool.map(_generate, len(slots) * [url], slots))
                added = r"added ubatch.*?seq_id_unq = \[ ([\d ]*) \]"
                found = re.findall(added, log.read_bytes()[before:].decode(), re.DOTALL)
                turns = sum(one != other for one, other in pairwise(found))
                echo(f"slots {slots} at once: passes with {sorted(set(found))}, {turns} changes from one to another")
        finally:
            engine.kill()


def _generate(url: str, slot: int) -> None:
    prompt = [bench_llama.TOKEN_IDS[0] + slot] * 4
    body = {"prompt": prompt, "n_predict": 64, "ignore_eos": True, "cache_prompt": False, "id_slot": slot}
    headers = {"content-type": "application/json"}
    with urlopen(Request(f"{url}/completion", json.dumps(body).encode(), headers)) as answer:
        answer.read()


if __name__ == "__main__":
    main("--quiet-machine" in sys.argv)
