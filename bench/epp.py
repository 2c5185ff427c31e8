"""What the endpoint picker takes: its latency at a rate of requests, and its CPU time for each thousand of them.

`python bench/epp.py`: the picker runs on one core. The client speaks to it as Envoy does, on another core, and sends
the engines nothing. Latency is from the last byte of a request's body to the picker's answer: by the picker's own clock
(`headway_gateway_overhead_seconds`), and as a client sees it that makes HTTP/2 frames by hand, as a client of gRPC in
Python would cost as much as the picker. Beside it the same messages with a server of the same library that answers
at once: what gRPC takes of it. Rounds of all cases take turns; their medians are printed. Where others use the machine,
`chrt -r 5 python bench/epp.py` gives the cores to the measurement.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
import grpc
import msgspec
import uvloop
from click import echo
from h2_calls import Connection

from gateway import cpu_s, free_ports
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker import messages as picker_messages

HERE = Path(__file__).parent
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
NUM_ENGINES = 4
CHUNK_BYTES = 60_000
"""Of the pieces in which Envoy sends a body."""
TOKEN = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"qwen3-8b","choices":[{"index":0,'
    b'"delta":{"content":" hello"},"finish_reason":null}]}\n\n'
)


def messages(prompt_tokens: int, num_tokens: int, answer_mode: int) -> tuple[list[bytes], list[bytes]]:
    """What Envoy says of a request, up to the end of its body; and of the answer, one part for each token."""
    words = "word " * prompt_tokens
    body = msgspec.json.encode({
        "model": "qwen3-8b", "messages": [{"role": "user", "content": words}], "max_tokens": 100, "stream": True,
    })  # fmt: skip

    def headers(**values: str) -> pb.HttpHeaders:
        pairs = [pb.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode()) for name, value in values.items()]
        return pb.HttpHeaders(headers=pb.HeaderMap(headers=pairs))

    first = headers(**{":method": "POST", ":path": "/v1/chat/completions", "content_type": "application/json"})
    config = pb.ProtocolConfiguration(request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=answer_mode)
    asked = [pb.ProcessingRequest(request_headers=first, protocol_config=config)]
    starts = range(0, len(body), CHUNK_BYTES)
    asked += [
        pb.ProcessingRequest(
            request_body=pb.HttpBody(body=body[start : start + CHUNK_BYTES], end_of_stream=start == starts[-1])
        )
        for start in starts
    ]
    answered = [
        pb.ProcessingRequest(response_headers=headers(**{":status": "200", "content_type": "text/event-stream"}))
    ]
    if answer_mode != pb.NONE:
        answered += num_tokens * [pb.ProcessingRequest(response_body=pb.HttpBody(body=TOKEN))]
        last = pb.HttpBody(body=b"data: [DONE]\n\n", end_of_stream=True)
        answered.append(pb.ProcessingRequest(response_body=last))
    return [each.SerializeToString() for each in asked], [each.SerializeToString() for each in answered]


class Load:
    """Requests at a rate, each at its time, however long the others take."""

    def __init__(self, connection: Connection, asked: list[bytes], answered: list[bytes]) -> None:
        self._connection = connection
        self._asked, self._answered = asked, answered
        self.latencies_s: list[float] = []

    async def one(self) -> None:
        call = self._connection.call()
        await call.write(*self._asked)
        sent_s = time.perf_counter()
        while (data := await call.read()) is not None:
            told = pb.ProcessingResponse.FromString(data)
            if told.WhichOneof("response") == "request_headers":
                self.latencies_s.append(time.perf_counter() - sent_s)
            elif told.request_body.response.body_mutation.streamed_response.end_of_stream:
                break
            elif told.HasField("immediate_response"):
                raise SystemExit(told.immediate_response.body.decode())
        for data in self._answered:
            await call.write(data)
            await call.read()
        call.done_writing()
        while await call.read() is not None:
            pass

    async def run(self, rate: float, seconds: float) -> None:
        start_s, running = time.perf_counter(), []
        for i in range(round(rate * seconds)):
            await asyncio.sleep(max(start_s + i / rate - time.perf_counter(), 0))
            running.append(asyncio.create_task(self.one()))
        await asyncio.gather(*running)


def overhead(url: str) -> dict[str, float]:
    """The picker's own histogram: requests by upper bound in seconds, and the sum of their seconds. Empty without a
    URL."""
    if not url:
        return {}
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    name = "headway_gateway_overhead_seconds"
    found = dict(re.findall(rf'^{name}_bucket\{{.*le="([^"]+)"\}} (\S+)', text, re.MULTILINE))
    found |= dict(re.findall(rf"^{name}_(sum)\{{.*\}} (\S+)", text, re.MULTILINE))
    return {bound: float(count) for bound, count in found.items()}


class Measured(NamedTuple):
    """One round of one case; times of a request in milliseconds."""

    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float
    own_ms: float
    """By the picker's own clock; 0.0 where it is no picker."""


async def measure(port: int, pid: int, url: str, rate: float, seconds: float, asked: tuple[int, int, int]) -> Measured:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(f"/{SERVICE}/Process"), "127.0.0.1", port)
    await connection.is_ready
    await Load(connection, *messages(*asked)).run(rate, 0.5)
    load, before, spent_s = Load(connection, *messages(*asked)), overhead(url), cpu_s(pid)
    await load.run(rate, seconds)
    spent_s, after = cpu_s(pid) - spent_s, overhead(url)
    connection.transport.close()
    found = sorted(load.latencies_s)
    p50_ms, p99_ms = (1000 * found[int(share * (len(found) - 1))] for share in (0.5, 0.99))
    own_ms = 1000 * (after["sum"] - before.get("sum", 0.0)) / len(found) if url else 0.0
    return Measured(p50_ms, p99_ms, 1000 * spent_s / len(found), own_ms)


async def answer_at_once() -> None:
    """A server of `grpc.aio` that answers each message with what the picker would, and does nothing else."""
    first = pb.ProcessingRequest.FromString(messages(2000, 0, pb.NONE)[0][1]).request_body.body
    told = list(picker_messages.picked("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", (), (), first, False, True))
    last = picker_messages.response_headers([("x-headway-replica", "mock/0")])

    async def process(_: object, context: Any) -> None:
        await context.read()
        await context.read()
        for data in told:
            await context.write(data)
        await context.read()
        await context.write(last)
        await context.read()

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    echo(port)
    await server.wait_for_termination()


def picker(stack: ExitStack, core: int | None) -> tuple[int, int, str]:
    """A picker on one core: its port for gRPC, its process, and its HTTP address."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    ports = free_ports(NUM_ENGINES + 2)
    for port in ports[2:]:
        mock = subprocess.Popen([sys.executable, str(HERE / "mock_engine.py"), str(port), "1", "0"])
        stack.callback(mock.kill)
    endpoints = ", ".join(f"'http://127.0.0.1:{port}'" for port in ports[2:])
    (folder / "fleet.yaml").write_text(
        f"fleet:\n  - {{name: mock, model: qwen3-8b, gpu: h100, api: openai, endpoints: [{endpoints}]}}\n"
        "policies: {routing: headway}\ngateway: {scrape_period_s: 5}\n"
    )
    command = [sys.executable, "-m", "headway", "epp", str(folder / "fleet.yaml"), "--restarts", "0"]
    command += ["--port", str(ports[0]), "--http-port", str(ports[1])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGKILL)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    url = f"http://127.0.0.1:{ports[1]}"
    while True:
        with suppress(OSError):
            if f'"up":{NUM_ENGINES}'.encode() in urllib.request.urlopen(f"{url}/health").read():
                return ports[0], process.pid, url
        time.sleep(0.2)


def floor(stack: ExitStack, core: int | None) -> tuple[int, int, str]:
    """The server that answers at once, on the same core."""
    process = subprocess.Popen([sys.executable, __file__, "--answer-at-once"], stdout=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    if core is not None:
        os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    return int(process.stdout.readline()), process.pid, ""


@click.command()
@click.option("--rate", default=500.0, show_default=True, help="Requests a second, of 2,000-token prompts.")
@click.option("--seconds", default=4.0, show_default=True, help="Of a round of a case.")
@click.option("--tokens", default=16, show_default=True, help="Of each answer.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--answer-at-once", "is_floor", is_flag=True, hidden=True)
def main(rate: float, seconds: float, tokens: int, rounds: int, is_floor: bool) -> None:
    """Measure the picker with short and long prompts, with and without the tokens of the answers."""
    if is_floor:
        uvloop.run(answer_at_once())
        return
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if len(cores) > 1 else None
    with ExitStack() as stack:
        served, alone = picker(stack, core), floor(stack, core)
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))
        short = (2000, 0, pb.NONE)
        cases = [
            (f"2,000 tokens, {rate:g}/s, no tokens seen", served, rate, short),
            ("gRPC alone, the same", alone, rate, short),
            (f"2,000 tokens, {rate / 5:g}/s, {tokens} tokens each", served, rate / 5,
             (2000, tokens, pb.FULL_DUPLEX_STREAMED)),
            ("100,000 tokens, 20/s, no tokens seen", served, 20.0, (100_000, 0, pb.NONE)),
        ]  # fmt: skip
        found: dict[str, list[Measured]] = {}
        for _ in range(rounds):
            for name, at, each_rate, asked in cases:
                found.setdefault(name, []).append(uvloop.run(measure(*at, each_rate, seconds, asked)))
    for name, measured in found.items():
        p50_ms, p99_ms, spent_s, own_ms = (statistics.median(column) for column in zip(*measured, strict=True))
        echo(f"{name}: p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms, of which own {own_ms:.2f} ms; "
             f"{spent_s:.2f} s CPU per 1,000 requests")  # fmt: skip


if __name__ == "__main__":
    main()
