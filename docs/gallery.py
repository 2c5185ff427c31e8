"""Take the pictures that the documentation shows: `make gallery`, with Chromium on the path.

Each picture is a page that a command writes or a server answers, so that pictures can be renewed when pages change.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
HEADWAY = [sys.executable, "-m", "headway"]
PAGES = {
    "report": ("compare --builtin chat", 1280, 1200),
    "capacity": (
        "plan capacity --workload chat --rate 50 --num-requests 500 --model llama-3.1-8b --gpus a100-80gb,h100-80gb-sxm"
        " --tp 1,2 --ttft-p99 2 --tpot-p99 0.03 --no-cache", 1280, 760,
    ),
    "fleet": ("plan fleet day.yaml --have a100:24,h100:6 --no-cache", 1280, 860),
    "advice": (
        "advise served.yaml --records monday tuesday wednesday --kinds routing,replicas,engine --no-cache", 1280, 1020,
    ),
}  # fmt: skip
"""Picture -> the command that writes its page with `--html`, and the size of the window."""
RECORDED = "simulate served.yaml --rate 26 --num-requests 1500 --prompt-tokens 900 --output-tokens 60"
"""How the days of `advice` are recorded."""
SERVED = """
fleet:
  - {name: fast, model: llama-3.1-8b, gpu: h100, engine: vllm, replicas: 2}
  - {name: slow, model: llama-3.1-8b, gpu: l40s, engine: vllm, replicas: 4}
slo: {ttft_s: 1, tpot_s: 0.04}
policies: {routing: round-robin}
"""
"""The fleet of `advice`."""

DAY = """
workload: {builtin: chat, arrivals: 60, num_requests: 3000, models: {llama-3.1-8b: 0.7, qwen3-14b: 0.3}}
slo: {ttft_s: 2, tpot_s: 0.05}
fleet:
  - {model: llama-3.1-8b, engine: vllm}
  - {model: qwen3-14b, engine: vllm}
"""
"""The requests of `fleet`."""
FLEET = """
slo: {ttft_s: 1, tpot_s: 0.05}
fleet:
  - {name: large, model: qwen3-8b, gpu: h100, engine: vllm, endpoints: [%s, %s]}
  - {name: small, model: qwen3-8b, gpu: l40s, engine: vllm, endpoints: [%s]}
policies: {routing: least-kv, ordering: priority, ordering_at: gateway}
gateway: {dashboard: open}
"""
LOAD_S = 25.0


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("gallery: no Chromium on the path")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "day.yaml").write_text(DAY)
        Path(folder, "served.yaml").write_text(SERVED)
        for seed, day in ((1, "monday"), (2, "tuesday"), (3, "wednesday")):
            record = [*RECORDED.split(), "--seed", str(seed), "--out", day]
            subprocess.run([*HEADWAY, *record], check=True, stdout=subprocess.DEVNULL, cwd=folder)
        for name, (command, width, height) in PAGES.items():
            page = f"{name}.html"
            subprocess.run(
                [*HEADWAY, *command.split(), "--html", page], check=True, stdout=subprocess.DEVNULL, cwd=folder
            )
            take(browser, Path(folder, page).as_uri(), IMAGES / f"{name}.png", width, height)
        subprocess.run([sys.executable, ROOT / "bench" / "staleness.py", IMAGES / "staleness.png"], check=True)
        with dashboard(Path(folder)) as url:
            take(browser, url, IMAGES / "dashboard.png", 1280, 1430)


def take(browser: str, url: str, picture: Path, width: int, height: int) -> None:
    """Write a screenshot of a page once its charts are drawn."""
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
             f"--window-size={width},{height}", "--virtual-time-budget=8000", f"--screenshot={picture}", url],
            check=True, capture_output=True,
        )  # fmt: skip
    click.echo(f"wrote {picture.name}, {picture.stat().st_size / 1e3:.0f} kB")


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """The dashboard's address, of a gateway that has served emulated engines for `LOAD_S`."""
    engines = [
        server("emulate", "--model", "qwen3-8b", "--gpu", gpu, "--port", "0") for gpu in ("h100", "h100", "l40s")
    ]
    try:
        fleet = folder / "fleet.yaml"
        fleet.write_text(FLEET % tuple(url for _, url in engines), encoding="utf-8")
        front, url = server("serve", str(fleet), "--port", "0")
        engines.append((front, url))
        stop = threading.Event()
        clients = [threading.Thread(target=load, args=(url, stop, i)) for i in range(24)]
        for client in clients:
            client.start()
        time.sleep(LOAD_S)
        yield f"{url}/dashboard"
        stop.set()
        for client in clients:
            client.join()
    finally:
        for process, _ in engines:
            process.terminate()
            process.wait()


def server(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server of Headway; return it and the address that it prints."""
    process = subprocess.Popen([*HEADWAY, *arguments], stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    for line in process.stdout:
        if " on http://" in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would block the server
            return process, "http://" + line.split(" on http://", 1)[1].split()[0]
    raise RuntimeError(f"headway {arguments[0]} ended with exit code {process.wait()}")


def load(url: str, stop: threading.Event, seed: int) -> None:
    """Stream one answer after the other."""
    while not stop.is_set():
        body = {
            "model": "qwen3-8b", "stream": True, "max_tokens": 60 + 40 * (seed % 7), "priority": seed % 2,
            "messages": [{"role": "user", "content": "tell a story " * (20 + 30 * (seed % 11))}],
        }  # fmt: skip
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


if __name__ == "__main__":
    main()
