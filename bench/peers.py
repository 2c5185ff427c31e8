"""Gateways side by side: the same mock engines, the same client, the same run; turn by turn, as the machine is shared.

Used by `bench/gateway.py --peers`, which measures those of `KNOWN` that are on PATH, and `--peer NAME=COMMAND`, in
which `{port}`, `{first}` and `{second}` (the engines' addresses) and `{config}` (LiteLLM's file) are filled in.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from statistics import median

import uvloop
from click import echo

from gateway import FLEET, HERE, INTERVAL_S, alone, connect, cpu_s, paced, together, workers

KNOWN = {
    "vllm-router": "vllm-router --host 127.0.0.1 --port {port} --worker-urls {first} {second} --policy round_robin"
    " --prometheus-port {free} --log-level error",
    "smg": "smg launch --host 127.0.0.1 --port {port} --worker-urls {first} {second} --policy round_robin"
    " --prometheus-port {free} --log-level error",
    "litellm": "litellm --host 127.0.0.1 --port {port} --config {config} --num_workers 1",
}
HEADWAY = f"{shlex.quote(sys.executable)} -m headway serve {{fleet}} --port {{port}}"
FIRST_PORT, MOCKS = 9320, (9341, 9342)
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""LiteLLM need not look for prices elsewhere."""
LITELLM = """
general_settings: {dangerously_permit_weak_or_unset_master_key: true}
model_list:
  - {model_name: qwen3-8b, litellm_params: {model: openai/qwen3-8b, api_base: "%s/v1", api_key: none}}
  - {model_name: qwen3-8b, litellm_params: {model: openai/qwen3-8b, api_base: "%s/v1", api_key: none}}
"""
PATIENCE_S = 90.0
NUM_ALONE, CLIENTS, SECONDS, STREAMS, ROUNDS = 300, 64, 4.0, 500, 3
Row = dict[str, float]


def chosen(named: tuple[str, ...], known: bool) -> dict[str, str]:
    """Commands of who is measured, by name."""
    found = {name: command for name, command in KNOWN.items() if known and which(name)}
    return {"headway": HEADWAY} | found | dict(each.split("=", 1) for each in named)


@contextmanager
def running(commands: dict[str, str], interval_s: float) -> Iterator[dict[str, tuple[int, subprocess.Popen[bytes]]]]:
    """Ports and processes of the contenders, before two engines."""
    urls = [f"http://127.0.0.1:{port}" for port in MOCKS]
    with tempfile.TemporaryDirectory() as folder:
        fleet, config = Path(folder) / "fleet.yaml", Path(folder) / "litellm.yaml"
        fleet.write_text(FLEET % ("openai", ", ".join(f'"{url}"' for url in urls)))
        config.write_text(LITELLM % tuple(urls))
        mocks = [
            subprocess.Popen([sys.executable, str(HERE / "mock_engine.py"), str(port), "100", str(interval_s)])
            for port in MOCKS
        ]
        started = {}
        try:
            time.sleep(2)
            for i, (name, command) in enumerate(commands.items()):
                port = FIRST_PORT + 2 * i
                words = shlex.split(command.format(
                    port=port, free=port + 1, first=urls[0], second=urls[1], fleet=fleet, config=config
                ))  # fmt: skip
                log = (Path(folder) / f"{name}.log").open("wb")
                started[name] = port, subprocess.Popen(
                    words, stdout=log, stderr=log, cwd=folder, start_new_session=True, env={**os.environ, **ENVIRONMENT}
                )  # fmt: skip
            yield started
        finally:
            for _, process in started.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            for process in (*mocks, *(process for _, process in started.values())):
                process.kill()
                process.wait()


async def ready(port: int) -> bool:
    """Wait until it answers."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        try:
            async with asyncio.timeout(5):
                await (await connect(port)).send(False)
        except (OSError, AssertionError, TimeoutError):
            await asyncio.sleep(0.5)
        else:
            return True
    return False


async def fast(port: int, pid: int | None) -> Row:
    """Latency alone, requests and streams a second, and requests per CPU second."""
    row = {"p50_ms": 1e3 * (await alone(port, NUM_ALONE))[NUM_ALONE // 2]}
    before = 0.0 if pid is None else _all_cpu_s(pid)
    row["requests"] = await together(port, CLIENTS, SECONDS, False)
    if pid is not None and (used := _all_cpu_s(pid) - before):
        row["per_cpu_s"] = row["requests"] * SECONDS / used
    row["streams"] = await together(port, CLIENTS, SECONDS, True)
    return row


def _all_cpu_s(pid: int) -> float:
    """CPU seconds of a gateway's processes so far."""
    return sum(map(cpu_s, (pid, *workers(pid))))


async def late(port: int, pid: int | None) -> Row:
    """By how much events are late at many streams; nothing, where they do not end in time."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            delays = await paced(port, STREAMS)
    except (TimeoutError, ValueError):  # of a stream that came as one there are no delays
        return {}
    return {"late_ms": 1e3 * delays[int(0.99 * len(delays))]}


async def rounds(started: dict[str, tuple[int, subprocess.Popen[bytes]]], what: object) -> dict[str, list[Row]]:
    """What each contender did, turn by turn; `straight` is none."""
    there: dict[str, tuple[int, int | None]] = {"straight": (MOCKS[0], None)}
    for name, (port, process) in started.items():
        if await ready(port):
            there[name] = port, process.pid
        else:
            echo(f"{name} does not answer", err=True)
    found: dict[str, list[Row]] = {name: [] for name in there}
    for _ in range(ROUNDS):
        for name, (port, pid) in list(there.items()):
            try:
                found[name].append(await what(port, pid))  # type: ignore[operator]
            except (OSError, AssertionError) as error:
                echo(f"{name}: {type(error).__name__} {error}", err=True)
            if name in started and (not found[name] or not found[name][-1]):
                del there[name]
                os.killpg(started[name][1].pid, signal.SIGKILL)  # what it still works at would slow down the others
    return found


def compare(commands: dict[str, str]) -> None:
    """The table, of medians."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    rows: dict[str, list[Row]] = {}
    for interval_s, what in ((0.0, fast), (INTERVAL_S, late)):
        with running(commands, interval_s) as started:
            for name, some in uvloop.run(rounds(started, what)).items():
                rows.setdefault(name, []).extend(some)
    echo(f"{'':14}{'added p50 ms':>14}{'requests/s':>12}{'per CPU s':>11}{'streams/s':>11}{'late p99 ms':>13}")
    direct = _median(rows["straight"], "p50_ms") or 0.0
    for name, some in rows.items():
        p50 = _median(some, "p50_ms")
        cells = [None if p50 is None else p50 - direct, *(_median(some, key) for key in ("requests", "per_cpu_s",
                 "streams", "late_ms"))]  # fmt: skip
        texts = [
            "-" if cell is None else f"{cell:,.{digits}f}" for cell, digits in zip(cells, (2, 0, 0, 0, 1), strict=True)
        ]
        echo(f"{name:14}{texts[0]:>14}{texts[1]:>12}{texts[2]:>11}{texts[3]:>11}{texts[4]:>13}")


def _median(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return median(values) if values else None
