"""Reasoning requests through the gateway to two vLLM engines on a CPU, ordered by `pascal` and by `fcfs` inside vLLM.

    PYTHONPATH=src HEADWAY_VLLM=.venv-vllm/bin/vllm .venv/bin/python bench/vllm_reasoning.py [--simulated] [ORDERING...]

Prints what clients saw beside what the simulator says for the same arrivals, lengths and placements. An
iteration of the engines lasts `STEP_S`, of which they sleep what they do not compute: other work of the machine shall
not decide, and the simulator needs no calibration. The model has random weights, so the lengths are forced.
"""
# ruff: noqa: E402, T201

from __future__ import annotations

import asyncio
import random
import re
import sys
import tempfile
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from statistics import mean, quantiles
from time import perf_counter
from typing import Any

import msgspec

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "support"))

from gateway_in_process import Reply, send_request
from headway.core.pacer import Pacer
from headway.core.request import Request
from headway.metrics.qoe import VIOLATED
from headway.metrics.tokens import token_times
from headway.policies import resolve
from simulation import Scenario, pool, seconds
from vllm_cpu.servers import SOURCE, Server, fleet, install
from vllm_server import END, THINK_END, write_model

ORDERINGS: dict[str, Any] = {
    "fcfs": "fcfs",
    "pascal": {"name": "pascal", "quantum_tokens": 30, "demotion_tokens": 400},
}
STEP_S, SEATS = 0.12, 4
BUSY_STEP_S = 0.125
"""What an iteration takes on a machine with more processes than cores: the simulator shows what that changes."""
NUM_REQUESTS, RATE = 60, 0.3
PACER = Pacer(ttfat_s=1.0, tpot_s=0.2)
FORCED = f"""
import time
import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

END, THINK_END, STEP_S = {END}, {THINK_END}, {STEP_S}


class Lengths(AdapterLogitsProcessor):
    end_s = 0.0

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        at = (params.extra_args or {{}}).get("reasoning")

        def force(output_ids, logits):
            ends = len(output_ids) == at - 1
            chosen = logits[THINK_END].clone()
            if ends:
                logits.fill_(float("-inf"))
            logits[END] = float("-inf")
            logits[THINK_END] = chosen if ends else float("-inf")
            return logits

        return None if at is None else force

    def apply(self, logits):
        left_s = self.end_s + STEP_S - time.monotonic()
        time.sleep(0.9 * STEP_S if left_s < -STEP_S else max(left_s, 0))
        self.end_s = time.monotonic()
        return super().apply(logits)
"""


def requests() -> list[Request]:
    chance, now, made = random.Random(1), 0.0, []
    for id in range(NUM_REQUESTS):
        now += chance.expovariate(RATE)
        reasoning = min(max(round(chance.lognormvariate(4.4, 0.9)), 10), 500)
        output = reasoning + chance.randint(20, 60)
        made.append(Request(id, now, chance.randint(50, 200), output, reasoning_tokens=reasoning))
    return made


Times = dict[int, list[float]]
"""Of each request, the seconds from its arrival to each of its tokens."""


def simulated(ordering: Any, step_s: float) -> Times:
    engine = {"max_num_seqs": SEATS, "block_size_tokens": 32, "kv_capacity_tokens": 32 * 299}
    fleet = (pool("a", replicas=2, **engine),)
    scenario = Scenario(
        tuple(requests()), fleet, ordering=lambda: resolve.ordering(ordering)(), line=seconds(step_s)
    )  # fmt: skip
    found = token_times(scenario.play("exact"), range(NUM_REQUESTS))
    return {each.id: [float(time_s) - each.arrival_s for time_s in found[each.id]] for each in scenario.requests}


class Client(Reply):
    """Notes when tokens come."""

    def __init__(self) -> None:
        super().__init__()
        self.began_s, self.times_s, self.tokens = perf_counter(), list[float](), list[int]()

    async def send(self, message: Any) -> None:
        await super().send(message)
        now_s = perf_counter() - self.began_s
        for data in re.findall(rb"^data: (\{.*\})$", message.get("body", b""), re.MULTILINE):
            for choice in msgspec.json.decode(data)["choices"]:
                tokens = choice.get("token_ids") or []
                self.tokens += tokens
                self.times_s += [now_s] * len(tokens)


async def chat(app: Any, request: Request) -> tuple[int, list[float]]:
    """The request's id and times. It is a chat, about as long as the request's prompt: each letter is a token."""
    words = random.Random(request.id)
    text = "".join(words.choice("stuvwxyz") for _ in range(request.prompt_tokens))
    body = {
        "model": "llama-3.1-8b", "messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0,
        "max_tokens": request.output_tokens, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": True},
        "vllm_xargs": {"reasoning": request.reasoning_tokens}, "return_token_ids": True,
    }  # fmt: skip
    client = Client()
    await send_request(app, "/v1/chat/completions", body, client.send)
    ends = [at for at, token in enumerate(client.tokens, 1) if token == THINK_END]
    if len(client.tokens) != request.output_tokens or ends != [request.reasoning_tokens]:
        raise SystemExit(f"request {request.id}: {len(client.tokens)} tokens, {ends}: {client.body[-300:]!r}")
    return request.id, client.times_s


async def served(ordering: Any, servers: list[Server], folder: Path) -> Times:
    name = ordering if isinstance(ordering, str) else ordering["name"]
    sections = {
        "pool": {"engine": {"name": "vllm-0.15", "block_size_tokens": 32, "orderings": [name]}},
        "policies": {"routing": "round-robin", "ordering": ordering, "ordering_at": "replica"},
        # On a busy machine engines may be silent for long.
        "gateway": {"outliers": {"max_ejected_share": 0}, "limits": {"silence_s": 60, "stuck_s": 600}},
    }
    async with fleet(folder / f"{name}.yaml", servers, **sections) as (_, app):
        await asyncio.gather(*(chat(app, request) for request in requests()[:2]))  # the first ones are slow
        loop, running = asyncio.get_running_loop(), []
        began = loop.time()
        for request in requests():
            await asyncio.sleep(began + request.arrival_s - loop.time())
            running.append(asyncio.create_task(chat(app, request)))
        return dict(await asyncio.gather(*running))


def measured(ordering: Any) -> Times:
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        (folder / "model").mkdir()
        write_model(folder / "model")
        (folder / "forced.py").write_text(FORCED)
        install(folder)
        config = {"headway_ordering": ordering, "headway_reasoning_end": THINK_END}
        options = [
            "--max-num-seqs", str(SEATS), "--scheduler-cls", "headway.vllm.Scheduler", "--reasoning-parser", "qwen3",
            "--additional-config", msgspec.json.encode(config).decode(), "--logits-processors", "forced:Lengths",
        ]  # fmt: skip
        env = {"PYTHONPATH": f"{SOURCE}:{folder}"}
        servers = [Server(folder, folder / "model", stack, *options, env=env) for _ in range(2)]
        for server in servers:
            server.wait()
        return asyncio.run(served(ordering, servers, folder))


def qoe(times_s: list[float], reasoning_end_s: float) -> float:
    """Of an answer's times, as `headway.metrics.qoe` defines it."""
    num, first_s = len(times_s), times_s[0]
    wait_s = max(first_s - reasoning_end_s - (PACER.ttfat_s or 0.0), 0.0)
    late_s = list(accumulate((time_s - first_s - at * PACER.tpot_s for at, time_s in enumerate(times_s)), max))
    expected = num * (late_s[-1] + wait_s) + PACER.tpot_s * num * (num + 1) / 2
    return 1 - (sum(late_s) + num * wait_s) / expected


def show(what: str, times: Times) -> None:
    columns: dict[str, list[float]] = {"TTFT": [], "reasoning to answer": [], "E2E": []}
    behind = 0
    for request in requests():
        own, end = times[request.id], request.reasoning_tokens
        for name, value in zip(columns, (own[0], own[end] - own[end - 1], own[-1]), strict=True):
            columns[name].append(value)
        behind += qoe(own[end:], own[end - 1]) < VIOLATED
    cells = [f"{name} {mean(each):.2f} s, P90 {quantiles(each, n=10)[-1]:.2f} s" for name, each in columns.items()]
    print(f"{what:26} {'; '.join(cells)}; QoE below {VIOLATED}: {behind / NUM_REQUESTS:.0%}", flush=True)


if __name__ == "__main__":
    chosen = [each for each in sys.argv[1:] if each in ORDERINGS] or list(ORDERINGS)
    for name in chosen:
        for step_s in (STEP_S, BUSY_STEP_S):
            show(f"{name}, simulated, {step_s} s", simulated(ORDERINGS[name], step_s))
    for name in chosen if "--simulated" not in sys.argv else ():
        show(f"{name}, vLLM", measured(ORDERINGS[name]))
