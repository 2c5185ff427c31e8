"""What engines without requests cost the gateway: CPU, memory, and the longest turn of its event loop.

`python bench/idle.py`: one process answers for all engines, at an address each, and the gateway's probes
read a metrics page as long as a vLLM engine's. How late one client's `GET /health` is answered tells the loop's turns.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import uvloop
from click import echo
from mock_engine import Mock, _answer

from gateway import cpu_s, free_ports, wait_for

_HISTOGRAMS, _BUCKETS = 24, 20
"""Of a page of vLLM 0.25: some 500 lines, 50 KB."""
_LABELS = 'engine="0",model_name="qwen3-8b"'


def page() -> bytes:
    """A metrics page of the names and the length of vLLM's."""
    lines = [
        f"vllm:num_requests_running{{{_LABELS}}} 0.0",
        f"vllm:num_requests_waiting{{{_LABELS}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{_LABELS}}} 0.0",
    ]
    for i in range(_HISTOGRAMS):
        name = f"vllm:some_histogram_of_seconds_{i}"
        lines += [f'{name}_bucket{{{_LABELS},le="{2.5**k}"}} {1000 * k}.0' for k in range(_BUCKETS)]
        lines += [f"{name}_sum{{{_LABELS}}} 12345.678", f"{name}_count{{{_LABELS}}} 20000.0"]
    return ("\n".join(lines) + "\n").encode()


class Idle(Mock):
    """An engine that nobody asks for tokens."""

    text = _answer(b"text/plain; version=0.0.4", page())

    def on_message_complete(self) -> None:
        if self._url == b"/metrics":
            self._transport.write(self.text)
        else:
            super().on_message_complete()


async def engines(port: int) -> None:
    """All engines, at all addresses of the loopback network, until killed."""
    server = await asyncio.get_running_loop().create_server(Idle, "0.0.0.0", port, backlog=4096)
    await server.serve_forever()


async def lateness(port: int, seconds: float) -> list[float]:
    """Seconds until the gateway answers a request that takes it no time, sorted: one every 5 ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took, end_s = [], time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-le")
        )
        await reader.readexactly(length)
        took.append(time.perf_counter() - began_s)
        await asyncio.sleep(0.005)
    return sorted(took)


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def measure(pid: int, port: int, seconds: float) -> None:
    """Prints what the gateway takes while nothing happens."""
    before, began_s = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    share = (cpu_s(pid) - before) / (time.monotonic() - began_s)
    echo(f"CPU of the gateway: {100 * share:.1f}% of a core; RSS {rss_mib(pid):.0f} MB")
    took = uvloop.run(lateness(port, seconds))
    late = ", ".join(
        f"{name} {1e3 * took[min(int(part * len(took)), len(took) - 1)]:.1f}"
        for name, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0))
    )
    echo(f"GET /health answered after, ms: {late}")


@click.command()
@click.option("--replicas", default=1000, show_default=True, type=click.IntRange(1, 60_000))
@click.option("--seconds", default=20.0, show_default=True, help="Of each of two measurements.")
@click.option("--engines", "serve_port", type=int, hidden=True)
def main(replicas: int, seconds: float, serve_port: int | None) -> None:
    """Start everything, measure, stop everything."""
    if serve_port is not None:
        uvloop.run(engines(serve_port))
        return
    port, mock = free_ports(2)
    urls = [f'"http://127.0.{1 + i // 250}.{1 + i % 250}:{mock}"' for i in range(replicas)]
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.yaml"
        fleet.write_text(
            f"fleet:\n  - {{name: mock, model: qwen3-8b, gpu: h100, api: vllm, endpoints: [{', '.join(urls)}]}}\n"
        )
        started = [
            subprocess.Popen([sys.executable, *command])
            for command in (
                [__file__, "--engines", str(mock)],
                ["-m", "headway", "serve", str(fleet), "--port", str(port), "--restarts", "0"],
            )
        ]
        try:
            wait_for(port, replicas)
            time.sleep(5.0)
            measure(started[-1].pid, port, seconds)
        finally:
            for process in reversed(started):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
