"""What clients can have Envoy tell the picker: bodies without an end, names of any length, messages of any form."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

import grpc

import envoys
import serving
from attacking import memory_ceiling
from ext_proc import CHAT, DUPLEX, MODEL, Call, Desk, desk, headers_message, picked
from headway.gateway.picker import ext_proc_pb2 as pb
from headway.gateway.picker.exchange import Exchange
from headway.gateway.picker.server import SERVICE, Picker
from keys import digest
from scripted import started
from serving import fleet_file

URLS = [f"http://127.0.0.1:{port}" for port in (9001, 9002)]
PATIENCE_S = 60.0
PART = 60_000


def tell(story: Callable[[Desk], Awaitable[None]], folder: Path, **settings: Any) -> None:
    async def run() -> None:
        async with desk(fleet_file(folder, URLS, gateway=settings)) as made, asyncio.timeout(PATIENCE_S):
            await story(made)

    asyncio.run(run())


def _begin(made: Desk, num_bytes: int, headers: Mapping[str, str] | None = None) -> Call:
    """A call whose body does not end."""
    call = made.call()
    sent = headers_message({":method": "POST", ":path": "/v1/chat/completions", **(headers or {})})
    modes = pb.ProtocolConfiguration(request_body_mode=DUPLEX, response_body_mode=DUPLEX)
    call.send(request_headers=sent, protocol_config=modes)
    call.send(request_body=pb.HttpBody(body=b"x" * num_bytes))
    return call


async def _held(made: Desk, num_bytes: int) -> None:
    while made.bodies.num_bytes != num_bytes:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("num_bytes", [0, PART, 3 * PART])
def test_bodies_without_an_end_have_a_deadline(num_bytes: int, tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        calls = [_begin(made, num_bytes) for _ in range(50)] if num_bytes else [made.call() for _ in range(50)]
        found = [await picked(each) for each in calls]
        assert {each.status for each in found} == {408} and found[0].json()["error"]["code"] == "body_timeout"
        await made.over()
        assert made.bodies.num_bytes == 0

    tell(story, tmp_path, body_timeout_s=0.3)


@pytest.mark.parametrize("num_bytes", [PART, 3 * PART])
def test_one_key_leaves_room_for_the_bodies_of_others(num_bytes: int, tmp_path: Path) -> None:
    """Short and long ones; what is freed can be used again."""
    one, other = ({"authorization": f"Bearer {name}"} for name in ("one", "other"))

    async def story(made: Desk) -> None:
        calls = [_begin(made, num_bytes, one) for _ in range(20)]
        await _held(made, 10 * num_bytes)
        for each in calls[10:]:
            assert (await picked(each)).json()["error"]["code"] == "bodies_too_long"
        kept = [_begin(made, num_bytes, other) for _ in range(10)]
        await _held(made, 20 * num_bytes)
        for each in (*calls[:10], *kept):
            each.end()
        await made.over()
        assert made.bodies.num_bytes == 0
        _begin(made, num_bytes, one)
        await _held(made, num_bytes)

    tell(story, tmp_path, max_bodies_bytes=20 * num_bytes, api_keys=[digest("one"), digest("other")])


def test_a_body_in_many_parts_takes_no_multiple_of_its_length(tmp_path: Path) -> None:
    """It is the same body in the end."""
    sent = b'{"model":"%s","messages":[{"role":"user","content":"%s"}]}' % (MODEL.encode(), b"hi" * 4_000)

    async def story(made: Desk) -> None:
        call = Call()
        exchange = Exchange(made.gateway, made.bodies, call)
        running = asyncio.create_task(exchange.run())
        modes = pb.ProtocolConfiguration(request_body_mode=DUPLEX, response_body_mode=DUPLEX)
        begun = headers_message({":method": "POST", ":path": "/v1/chat/completions"})
        call.send(request_headers=begun, protocol_config=modes)
        for byte in sent:
            call.send(request_body=pb.HttpBody(body=bytes((byte,))))
        await _held(made, len(sent))
        assert sum(map(sys.getsizeof, exchange._body)) < 1.5 * len(sent) + 64 * sys.getsizeof(b"x")
        call.send(request_body=pb.HttpBody(body=b"", end_of_stream=True))
        assert (await picked(call)).json() == json.loads(sent)
        call.end()
        await running

    tell(story, tmp_path)


@pytest.mark.parametrize("headers", [{f"h{i}": "v" for i in range(300)}, {"x": "y" * 70_000}], ids=["many", "long"])
def test_headers_are_limited_as_the_gateways_own(headers: dict[str, str], tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        for sent, status in ((headers, 431), (dict(list(headers.items())[:200]) if len(headers) > 1 else {}, 200)):
            call = made.call()
            call.request(headers=sent)
            found = await picked(call)
            assert (found.status or 200) == status
            call.end()
        await made.over()

    tell(story, tmp_path)


BASE_MIB, CALL_MIB = 24.0, 0.25
"""The bound of SECURITY.md, besides what the bodies have of `max_bodies_bytes`."""
NUM_CALLS = 300


def _of_call(*messages: pb.ProcessingRequest) -> list[bytes]:
    return [each.SerializeToString() for each in messages]


def _kinds(number: int) -> dict[str, list[bytes]]:
    """What a call has sent when it waits."""
    modes = pb.ProtocolConfiguration(request_body_mode=DUPLEX, response_body_mode=DUPLEX)

    def begun(more: Mapping[str, str]) -> pb.ProcessingRequest:
        headers = {":method": "POST", ":path": "/v1/chat/completions", **more}
        return pb.ProcessingRequest(request_headers=headers_message(headers), protocol_config=modes)

    def body(data: bytes, is_last: bool = False) -> pb.ProcessingRequest:
        return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=is_last))

    chat = json.dumps({**CHAT, "stream": True}).encode()
    named = begun({"x-gateway-inference-fairness-id": f"{number}-" + LONG})
    answer = pb.ProcessingRequest(
        response_headers=headers_message({":status": "200", "content-type": "text/event-stream"})
    )
    event = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"data: " + b"x" * 30_000))
    return {
        "nothing": [],
        "long headers": _of_call(begun({"x": "y" * 60_000})),
        "many headers": _of_call(begun({f"h{i}": "v" for i in range(250)})),
        "too many headers": _of_call(begun({f"h{i}": "v" for i in range(5_000)})),
        "half a body": _of_call(begun({}), body(b"x" * PART)),
        "a body in many parts": _of_call(begun({}), *[body(b"x")] * 300),
        "a request at its engine": _of_call(named, body(chat, True)),
        "half an event": _of_call(named, body(chat, True), answer, event),
    }


@pytest.mark.ci
def test_calls_take_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    """As Envoy's would, all at once; those of each kind end before the next ones."""
    engine = started()
    settings = {"scrape_period_s": 3600.0, "body_timeout_s": 600.0}
    picker = envoys.picker(fleet_file(tmp_path, [engine.url], gateway=settings))

    async def hold(name: str) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.grpc_port}") as channel:
            process = channel.stream_stream(f"/{SERVICE}/Process")
            calls: list[Any] = []
            for number in range(NUM_CALLS):
                calls.append(process())
                for message in _kinds(number)[name]:
                    await calls[-1].write(message)
            await asyncio.sleep(1.0)
            for each in calls:
                each.cancel()

    with closing(picker), closing(engine):
        serving.all_up(picker, 1)
        for name in _kinds(0):
            bodies_mib = 3.5 * NUM_CALLS * PART / 2**20 if name == "half a body" else 0.0
            print(name)  # noqa: T201
            with memory_ceiling(picker, peak_mib=BASE_MIB + NUM_CALLS * CALL_MIB + bodies_mib):
                asyncio.run(hold(name))


LONG = "n" * 5_000


def _messages() -> dict[str, list[pb.ProcessingRequest]]:
    post = {":method": "POST", ":path": "/v1/chat/completions"}
    mode = pb.ProtocolConfiguration(request_body_mode=DUPLEX, response_body_mode=DUPLEX)
    headers = pb.ProcessingRequest(request_headers=headers_message(post), protocol_config=mode)
    body = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"[]", end_of_stream=True))
    unknown = pb.ProtocolConfiguration(request_body_mode=99)  # type: ignore[arg-type]
    return {
        "a body first": [body],
        "trailers first": [pb.ProcessingRequest(request_trailers=pb.HttpTrailers())],
        "an answer first": [pb.ProcessingRequest(response_headers=headers_message({":status": "200"}))],
        "an answer's body first": [pb.ProcessingRequest(response_body=pb.HttpBody(body=b"a"))],
        "nothing": [pb.ProcessingRequest()],
        "headers twice": [headers, headers],
        "an unknown mode": [pb.ProcessingRequest(request_headers=headers_message(post), protocol_config=unknown)],
        "no body": [headers, body],
        "no text": [headers, pb.ProcessingRequest(request_body=pb.HttpBody(body=b"\xff\xfe", end_of_stream=True))],
    }


@pytest.mark.parametrize("name", _messages())
def test_malformed_messages_are_refused_in_a_line(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(made: Desk) -> None:
        call = made.call()
        for each in _messages()[name]:
            call._requests.put_nowait(each)
        found = await picked(call)
        assert found.status in (400, 404, 500) and found.json()["error"]["code"] != "internal_error"
        await made.over()
        assert not made.gateway.driver.requests and made.bodies.num_bytes == 0

    with caplog.at_level(logging.WARNING):
        tell(story, tmp_path)
    assert not [each for each in caplog.records if each.exc_info]


def test_a_request_is_picked_for_once_and_any_status_is_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(made: Desk) -> None:
        for then in ("a second body", "a status that is none"):
            call = made.call()
            call.request()
            await picked(call)
            if then == "a second body":
                call.send(request_body=pb.HttpBody(body=b"{}", end_of_stream=True))
                assert (await picked(call)).json()["error"]["code"] == "invalid_ext_proc"
            else:
                call.answer(status="2oo")  # type: ignore[arg-type]
                assert (await call.response()).WhichOneof("response") == "response_headers"
                call.end()
            await made.over()
            assert not made.gateway.driver.requests

    with caplog.at_level(logging.WARNING):
        tell(story, tmp_path)
    assert not [each for each in caplog.records if each.exc_info]


def test_bytes_that_are_no_message_end_their_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(made: Desk) -> None:
        picker = Picker(made.gateway)
        port = picker.listen("127.0.0.1:0")
        async with picker.running(), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            process = channel.stream_stream(f"/{SERVICE}/Process")
            for sent in (b"\xff" * 100, b"\x12\xff\xff\xff\xff\x0f", None):
                call: Any = process()
                if sent is not None:
                    await call.write(sent)
                answer = pb.ProcessingResponse.FromString(await call.read())
                assert answer.immediate_response.status.code == (408 if sent is None else 400)
                assert await call.read() is grpc.aio.EOF

    with caplog.at_level(logging.WARNING):
        tell(story, tmp_path, drain_s=0, body_timeout_s=0.3)
    assert not [each for each in caplog.records if each.exc_info]
