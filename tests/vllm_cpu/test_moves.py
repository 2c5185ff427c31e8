"""Streams that move between two vLLM servers on a CPU, with their KV caches: `make vllm-cpu`."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import pytest

from gateway_in_process import Reply, send_request
from headway.gateway.gateway import Gateway
from headway.gateway.scheduling.in_flight import InFlightRequest
from vllm_cpu.servers import MARKS, SOURCE, Server, fleet, make_model, show

pytestmark = MARKS
LENGTHS, NUM_ROUNDS = (200, 1000, 3000), 17
AT_TOKENS, OUTPUT_TOKENS = 40, 120
"""Tokens after which a stream moves, and all of them."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Server]]]:
    """Two servers that share a folder for their KV blocks, and the folder."""
    folder = tmp_path_factory.mktemp("moves")
    model, blocks = make_model(folder), folder / "blocks"
    blocks.mkdir()
    tier = {"type": "fs", "root_dir": str(blocks), "n_read_threads": 2, "n_write_threads": 2}
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "headway.vllm.cpu_offload",
            "cpu_bytes_to_use": 64 << 20,
            "offload_prompt_only": False,
            "secondary_tiers": [tier],
        },
    }
    # What is computed again, is in another batch: in bfloat16 that decides between tokens that are nearly as likely.
    option = "--dtype", "float32", "--kv-transfer-config", msgspec.json.encode(connector).decode()
    with ExitStack() as stack:
        made = [Server(folder, model, stack, *option, env={"PYTHONPATH": SOURCE}) for _ in range(2)]
        for server in made:
            server.wait()
        yield blocks, made


@dataclass
class Moved:
    """A stream that moved once."""

    tokens: list[int]
    pause_s: float
    """From the last token of the one server to the first of the other."""
    source: int


class Client(Reply):
    """Reads a stream, and has it moved to the other replica after some tokens."""

    def __init__(self, gateway: Gateway, blocks: Path | None) -> None:
        super().__init__()
        self._gateway, self._blocks = gateway, blocks
        self.tokens: list[int] = []
        self._last_s, self.pause_s = 0.0, 0.0
        self.source: int | None = None
        self._request: InFlightRequest | None = None

    async def send(self, message: Any) -> None:
        await super().send(message)
        now_s, before = perf_counter(), len(self.tokens)
        for data in re.findall(rb"^data: (\{.*\})$", message.get("body", b""), re.MULTILINE):
            for choice in msgspec.json.decode(data)["choices"]:
                self.tokens += choice.get("token_ids") or []
        if len(self.tokens) == before:
            return
        driver = self._gateway.driver
        if self._request is None:
            (self._request,) = driver.requests.values()
        live = self._request.live
        if self.source is None and len(self.tokens) >= AT_TOKENS:
            assert self._request.can_move
            self.source = live.replica
            if self._blocks is not None:
                for file in self._blocks.rglob("*.bin"):
                    file.unlink()
            asyncio.get_running_loop().call_soon(driver.move, live, 1 - self.source, None, driver.now)
        elif self.source is not None and live.moves and not self.pause_s:
            self.pause_s = now_s - self._last_s
        self._last_s = now_s


async def moved(gateway: Gateway, app: Any, prompt: list[int], blocks: Path | None) -> Moved | None:
    """A stream that moves; None if its last token had come by then, as happens where a busy machine lets nobody read.

    `blocks`: the folder of the KV caches, which is emptied before the move: only the tokens go to the other server.
    """
    body = {
        "model": "llama-3.1-8b",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    client = Client(gateway, blocks)
    await send_request(app, "/v1/completions", body, client.send)
    assert client.status == 200 and len(client.tokens) == OUTPUT_TOKENS, client.body[-500:]
    return Moved(client.tokens, client.pause_s, client.source) if client.source is not None and client.pause_s else None


def loaded_bytes(servers: list[Server]) -> int:
    """Bytes of KV cache that the servers have loaded from the folder."""
    found = [each.metric(r'vllm:kv_offload_tiering_read_bytes_total\{.*tier="1:fs"\} (\S+)') for each in servers]
    return sum(int(float(value)) for values in found for value in values)


def continued(gateway: Gateway) -> dict[str, int]:
    """Tokens with which engines began that continue an answer, by the gateway's metrics."""
    page = gateway.telemetry.metrics.page()
    found = re.findall(r'^headway_continued_tokens_total\{.*kv="(\w+)"\} (\d+)$', page, re.MULTILINE)
    return {"computed": 0, "cached": 0} | {kv: int(tokens) for kv, tokens in found}


def test_streams_move_with_their_kv_caches(servers: tuple[Path, list[Server]], tmp_path: Path) -> None:
    """51 moves with the KV cache, and a third as many by token replay; the answers are those of one server alone."""
    blocks, engines = servers
    chance = random.Random(5)

    async def story() -> None:
        sections = {"policies": {"routing": "round-robin"}, "gateway": {"outliers": {"max_ejected_share": 0}}}
        async with fleet(tmp_path / "fleet.yaml", engines, **sections) as (gateway, app):
            for length in LENGTHS:
                pauses: dict[bool, list[float]] = {True: [], False: []}
                computed: dict[bool, list[int]] = {True: [], False: []}
                num_bytes, num_same = 0, {True: 0, False: 0}
                rounds = [(True, False)[i % 4 == 3] for i in range(NUM_ROUNDS * 4 // 3)]
                while rounds:
                    prompt = [chance.randrange(3, 259) for _ in range(length)]
                    before, bytes_before = continued(gateway), loaded_bytes(engines)
                    stream = await moved(gateway, app, prompt, None if rounds[-1] else blocks)
                    if stream is None:
                        continue
                    with_kv, after = rounds.pop(), continued(gateway)
                    pauses[with_kv].append(stream.pause_s)
                    computed[with_kv].append(after["computed"] - before["computed"])
                    assert with_kv or after["cached"] == before["cached"]
                    num_bytes += loaded_bytes(engines) - bytes_before
                    answer = await asyncio.to_thread(
                        engines[stream.source].complete, prompt, OUTPUT_TOKENS, return_token_ids=True
                    )
                    num_same[with_kv] += answer["choices"][0]["token_ids"] == stream.tokens
                for with_kv, how in ((True, "with KV"), (False, "by replay")):
                    show(
                        f"{length} prompt tokens, {how}: pause {1e3 * median(pauses[with_kv]):.0f} ms"
                        f" ({1e3 * max(pauses[with_kv]):.0f} at most), {median(computed[with_kv]):.0f} tokens computed"
                        f" ({max(computed[with_kv])} at most), {num_same[with_kv]} of {len(pauses[with_kv])} identical"
                    )
                show(f"{num_bytes / NUM_ROUNDS / 1e3:.0f} kB were loaded for each")
                assert num_same[True] == len(pauses[True]) == NUM_ROUNDS and max(computed[True]) < min(computed[False])

    asyncio.run(story())
