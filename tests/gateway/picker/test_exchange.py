"""The endpoint picker protocol, by hand-made messages: no Envoy, no network, no engine."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

pytest.importorskip("grpc")
pytest.importorskip("httptools")

from ext_proc import (
    BUFFERED,
    CHAT,
    DUPLEX,
    MODEL,
    NONE,
    STREAMED,
    Call,
    Desk,
    Picked,
    desk,
    headers_message,
    picked,
    set_headers,
)
from headway.control.decisions import Decision
from headway.core.record import Cause, Outcome
from headway.gateway.picker import ext_proc_pb2 as pb
from keys import digest
from serving import fleet_file

ENDPOINTS = [f"127.0.0.1:{port}" for port in range(9001, 9005)]
URLS = [f"http://{endpoint}" for endpoint in ENDPOINTS]
Story = Callable[[Desk], Awaitable[Any]]


def tell(story: Story, folder: Path, *, is_up: bool = True, log: list[Decision] | None = None, **changes: Any) -> Any:
    """Run a story of calls to the picker of a fleet of four replicas."""

    async def run() -> Any:
        async with desk(fleet_file(folder, changes.pop("engines", URLS), **changes), log, is_up) as made:
            return await story(made)

    return asyncio.run(run())


async def asked(made: Desk, modes: tuple[int, int] = (DUPLEX, DUPLEX), **request: Any) -> tuple[Call, Picked]:
    call = made.call(*modes)
    call.request(**request)
    return call, await picked(call)


def in_flight(made: Desk) -> list[int]:
    return [replica.num_in_flight for replica in made.gateway.replicas]


def chunk(text: str = "", **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}] if text else []
    return b"data: " + msgspec.json.encode({"object": "chat.completion.chunk", "choices": choices, **more}) + b"\n\n"


USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}


def test_a_request_goes_where_control_says_by_header_and_by_metadata(tmp_path: Path) -> None:
    log: list[Decision] = []

    async def story(made: Desk) -> None:
        for _ in range(4):
            _, found = await asked(made)
            assert found.metadata["x-gateway-destination-endpoint"] == ",".join(found.endpoints)
            assert found.endpoints[0] == ENDPOINTS[log[-1].choice]
            assert len(found.endpoints) == 3 and len(set(found.endpoints)) == 3
        assert in_flight(made) == [1, 1, 1, 1]

    tell(story, tmp_path, log=log, policies={"routing": "least-loaded"})
    assert [decision.what for decision in log] == ["placed"] * 4


@pytest.mark.parametrize("modes", [(DUPLEX, DUPLEX), (BUFFERED, STREAMED), (DUPLEX, STREAMED)], ids=str)
def test_a_stream_is_counted_and_its_usage_hidden_from_clients_that_did_not_ask(
    tmp_path: Path, modes: tuple[int, int]
) -> None:
    async def story(made: Desk) -> None:
        call, found = await asked(made, modes, body={**CHAT, "stream": True})
        assert found.json()["stream_options"] == {"include_usage": True}
        (live,) = (request.live for request in made.gateway.driver.requests.values())
        call.answer(content_type="text/event-stream")
        headers = set_headers((await call.response()).response_headers.response.header_mutation)
        assert headers == {"x-headway-replica": made.gateway.replicas[live.replica].name, "x-request-id": "id"}
        passed = b""
        sent = [chunk("a")[:20], chunk("a")[20:] + chunk("b"), chunk(usage=USAGE), b"data: [DONE]\n\n"]
        for part in sent:
            call.part(part)
        call.part(b"", is_last=True)
        for part in [*sent, b""] if modes[1] == STREAMED else ():
            mutation = (await call.response()).response_body.response.body_mutation
            kind = mutation.WhichOneof("mutation")
            passed += part if kind is None else mutation.body
        while modes[1] == DUPLEX:
            streamed = (await call.response()).response_body.response.body_mutation.streamed_response
            passed += streamed.body
            if streamed.end_of_stream:
                break
        assert passed == chunk("a") + chunk("b") + b"data: [DONE]\n\n"
        assert (live.prompt_tokens, live.generated_tokens) == (40, 2) and in_flight(made) == [0, 0, 0, 0]
        call.end()
        await made.over()
        assert made.gateway.telemetry.records().requests["outcome"].tolist() == [Outcome.FINISHED]

    tell(story, tmp_path)


def test_a_client_that_asks_for_usage_gets_the_stream_as_it_comes(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        call, found = await asked(made, body=body)
        assert found.json() == body
        call.answer(content_type="text/event-stream")
        await call.response()
        sent = b": ping\n\n" + chunk("a") + chunk(usage=USAGE)
        call.part(sent)
        assert (await call.response()).response_body.response.body_mutation.streamed_response.body == sent

    tell(story, tmp_path)


ERROR = b'data: {"error": {"message": "inner failure: out of memory, see", "code": 500}}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("content_type", ["text/event-stream; charset=utf-8", "application/json"])
@pytest.mark.parametrize("tail", [ERROR, b"data: what is no chunk\n\n", b"data: {", b'{"choices": []}'])
@pytest.mark.parametrize("ends_with_trailers", [False, True])
def test_every_byte_of_what_the_picker_cannot_read_reaches_the_client(
    tmp_path: Path, tail: bytes, content_type: str, ends_with_trailers: bool
) -> None:
    async def story(made: Desk) -> None:
        call, _ = await asked(made, body={**CHAT, "stream": True})
        call.answer(content_type=content_type)
        await call.response()
        sent = chunk("a").replace(b"\n", b"\r\n") + tail
        for part in (sent[:7], sent[7:60], sent[60 : len(sent) - 4], sent[len(sent) - 4 :]):
            call.part(part)
        if ends_with_trailers:
            call.send(response_trailers=pb.HttpTrailers())
        else:
            call.part(b"", is_last=True)
        passed = b""
        while (message := await call.response()).WhichOneof("response") == "response_body":
            streamed = message.response_body.response.body_mutation.streamed_response
            passed += streamed.body
            if streamed.end_of_stream:
                break
        assert passed == sent
        call.end()
        await made.over()

    tell(story, tmp_path)


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, Outcome.FINISHED), (400, Outcome.REJECTED), (500, Outcome.REJECTED)]
)
def test_an_answer_that_is_not_streamed_is_counted_at_its_end(tmp_path: Path, status: int, outcome: Outcome) -> None:
    async def story(made: Desk) -> None:
        call, _ = await asked(made)
        (live,) = (request.live for request in made.gateway.driver.requests.values())
        call.answer(status, content_type="application/json")
        answer = msgspec.json.encode({"object": "chat.completion", "choices": [], "usage": USAGE})
        call.part(answer[:10])
        call.part(answer[10:], is_last=True)
        await call.response()
        parts = [(await call.response()).response_body.response.body_mutation.streamed_response for _ in range(2)]
        assert b"".join(part.body for part in parts) == answer and parts[1].end_of_stream
        call.end()
        await made.over()
        assert in_flight(made) == [0, 0, 0, 0] and live.generated_tokens == (2 if status == 200 else 0)
        assert made.gateway.telemetry.records().requests["outcome"].tolist() == [outcome]

    tell(story, tmp_path)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call, _ = await asked(made)
        assert sum(in_flight(made)) == 1
        call.end()
        await made.over()
        assert sum(in_flight(made)) == 0
        assert made.gateway.telemetry.records().requests["outcome"].tolist() == [Outcome.CANCELLED]

    tell(story, tmp_path)


def test_only_endpoints_of_the_subset_are_chosen(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        for _ in range(4):
            _, found = await asked(made, subset=[ENDPOINTS[1], ENDPOINTS[3], "10.9.9.9:1"])
            assert set(found.endpoints) == {ENDPOINTS[1], ENDPOINTS[3]}
        assert in_flight(made) == [0, 2, 0, 2]
        for subset in ([], ["10.9.9.9:1"]):
            _, found = await asked(made, subset=subset)
            assert found.status == 503 and found.json()["error"]["code"] == "no_capacity"
        made.set_up(made.gateway.replicas[1], is_up=False)
        made.set_up(made.gateway.replicas[3], is_up=False)
        _, found = await asked(made, subset=[ENDPOINTS[1], ENDPOINTS[3]])
        assert found.status == 503

    tell(story, tmp_path, policies={"routing": "least-loaded"})


def test_a_held_request_whose_subset_is_gone_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        first, _ = await asked(made)
        second, third = made.call(), made.call()
        second.request(subset=[ENDPOINTS[1]])
        while not made.gateway.driver.control.services[0].hold_queue.num:
            await asyncio.sleep(0)
        third.request()
        while made.gateway.driver.control.services[0].hold_queue.num < 2:
            await asyncio.sleep(0)
        made.set_up(made.gateway.replicas[1], is_up=False)
        first.end()
        assert (await picked(second)).status == 503
        assert (await picked(third)).endpoints[0] == ENDPOINTS[0]

    policies = {"routing": "least-loaded", "ordering_at": "gateway", "window": 1}

    async def both(made: Desk) -> None:
        busy, _ = await asked(made, subset=[ENDPOINTS[1]])
        await story(made)
        busy.end()

    tell(both, tmp_path, engines=URLS[:2], policies=policies)


def test_a_request_without_an_id_gets_one_everywhere(tmp_path: Path) -> None:
    """The client's is not sent again; one that it lacks is in the engine's request, the answer, log and records."""
    log: list[Decision] = []

    async def story(made: Desk) -> None:
        _, named = await asked(made)
        assert "x-request-id" not in named.headers
        call, found = await asked(made, headers={"x-request-id": "not a name"})
        call.answer(content_type="application/json")
        headers = set_headers((await call.response()).response_headers.response.header_mutation)
        call.part(b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}', is_last=True)
        await call.response()
        ids = made.gateway.telemetry.records().request_ids
        assert ids is not None and len(headers["x-request-id"]) == 32
        assert found.headers["x-request-id"] == headers["x-request-id"] == ids[-1].as_py() == log[-1].request

    tell(story, tmp_path, log=log)


def test_a_request_counts_where_envoy_has_sent_it(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call, found = await asked(made)
        assert found.endpoints[0] == ENDPOINTS[0]
        call.answer(served=found.endpoints[1], content_type="application/json")
        await call.response()
        assert in_flight(made) == [0, 1, 0, 0]
        call.part(b'{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}', is_last=True)
        await call.response()
        records = made.gateway.telemetry.records()
        rows, stays = records.requests, records.segments
        assert stays["replica"].tolist() == [0, 1]
        assert stays["cause"].tolist() == [Cause.CRASHED, Cause.FINISHED]
        assert rows["replica"].tolist() == [1] and rows["attempts"].tolist() == [2] and sum(in_flight(made)) == 0

    tell(story, tmp_path, policies={"routing": "least-loaded"})


def test_a_refusal_has_the_status_and_error_that_the_protocol_asks_for(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"body": b"{"}, 400, "invalid_json"),
            ({"body": {**CHAT, "model": "none"}}, 404, "model_not_found"),
            ({"body": {**CHAT, "max_tokens": 1 << 20}}, 400, "context_length_exceeded"),
            ({"headers": {"content-length": str(1 << 40)}}, 413, "body_too_long"),
        ]
        for request, status, code in cases:
            _, found = await asked(made, **request)
            assert (found.status, found.json()["error"]["code"]) == (status, code)
            assert found.headers["content-type"] == "application/json" and found.headers["x-request-id"] == "id"
        for mode in (NONE, STREAMED):
            _, found = await asked(made, (mode, DUPLEX))
            assert (
                found.status == 500 and "expected FULL_DUPLEX_STREAMED or BUFFERED" in found.json()["error"]["message"]
            )
        made.gateway.refuse_requests()
        _, found = await asked(made)
        assert found.status == 503 and found.headers["retry-after"] == "1"

    tell(story, tmp_path)


def test_shedding_is_a_429_and_a_fleet_that_is_down_a_503(tmp_path: Path) -> None:
    async def full(made: Desk) -> Picked:
        await asked(made)
        held = made.call()
        held.request()
        while not made.gateway.driver.control.services[0].hold_queue.num:
            await asyncio.sleep(0)
        return (await asked(made))[1]

    async def down(made: Desk) -> Picked:
        return (await asked(made))[1]

    policies = {"ordering_at": "gateway", "window": 1}
    assert tell(full, tmp_path, engines=URLS[:1], policies=policies, gateway={"max_held": 1}).status == 429
    assert tell(down, tmp_path, engines=URLS[:1], is_up=False, gateway={"hold_s": 0}).status == 503


def test_a_held_request_waits_and_envoy_with_it(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        first, _ = await asked(made)
        second, third = made.call(BUFFERED, STREAMED), made.call()
        second.request()
        assert (await second.response()).WhichOneof("response") == "request_headers"
        assert (await second.response()).override_message_timeout.seconds == 600
        third.request()
        third.end()  # its client does not wait
        while made.gateway.driver.control.services[0].hold_queue.num != 1 or third.num_responses:
            await asyncio.sleep(0)
        first.end()
        assert (await picked(second)).endpoints == [ENDPOINTS[0]]

    tell(story, tmp_path, engines=URLS[:1], policies={"ordering_at": "gateway", "window": 1})


def test_an_engine_that_is_given_up_has_its_requests_ended(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call, _ = await asked(made)
        replica = made.gateway.replicas[0]
        made.set_up(replica, is_up=False)
        made.gateway.driver.fail_over(replica)
        told = (await call.response()).immediate_response
        assert told.status.code == 502 and b"does not answer any more" in told.body and sum(in_flight(made)) == 0

    tell(story, tmp_path, engines=URLS[:1])


def test_envoy_may_find_another_engine_before_its_request_is_given_up(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call, found = await asked(made)
        made.set_up(made.gateway.replicas[0], is_up=False)
        made.gateway.driver.fail_over(made.gateway.replicas[0])
        call.answer(served=found.endpoints[1], content_type="application/json")
        while in_flight(made) != [0, 1]:
            await asyncio.sleep(0)
        call.part(b'{"choices": []}', is_last=True)
        assert [(await call.response()).WhichOneof("response") for _ in range(2)] == [
            "response_headers",
            "response_body",
        ]

    tell(story, tmp_path, engines=URLS[:2], policies={"routing": "least-loaded"})


def test_model_tier_tenant_and_key_are_those_of_the_request(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        lives = []
        for headers in (
            {"x-gateway-inference-objective": "batch"},
            {"x-gateway-inference-objective": "unknown"},
            {"x-headway-tier": "1"},
            {"x-llm-d-inference-objective": "premium", "x-gateway-inference-objective": "batch"},
            {"x-llm-d-inference-objective": "batch", "x-llm-d-inference-fairness-id": "umbrella"},
        ):
            made.gateway.replicas[0].reported_model = "/models/qwen"
            call, found = await asked(made, headers={"x-gateway-inference-fairness-id": "acme", **headers})
            assert found.json()["model"] == "/models/qwen" and found.headers["content-length"] == str(
                len(found.body or b"")
            )
            lives += [request.live for request in made.gateway.driver.requests.values()]
            call.end()
            await made.over()
        assert [(live.tier, live.tenant) for live in lives] == [
            (2, "acme"),
            (0, "acme"),
            (1, "acme"),
            (1, "acme"),
            (2, "umbrella"),
        ]

    tell(story, tmp_path, engines=URLS[:1], gateway={"objectives": {"premium": 1, "batch": 2}})


@pytest.mark.parametrize("header", ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"])
def test_a_header_may_name_the_model(tmp_path: Path, header: str) -> None:
    async def story(made: Desk) -> None:
        _, found = await asked(made, body={**CHAT, "model": "alias"}, headers={header: MODEL})
        assert not found.status and found.json()["model"] == MODEL
        _, found = await asked(made, headers={header: "unknown"})
        assert found.status == 404

    tell(story, tmp_path, engines=URLS[:1])


def test_a_refusal_says_why_as_llm_d_does(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        reason = "x-llm-d-request-dropped-reason"
        _, found = await asked(made, body={**CHAT, "model": "unknown"})
        assert found.status == 404 and reason not in found.headers
        call = made.call()
        call.request(subset=["10.9.9.9:1"])
        found = await picked(call)
        assert (found.status, found.headers[reason]) == (503, "rejected-no-endpoints")
        made.gateway.refuse_requests()
        _, found = await asked(made)
        assert (found.status, found.headers[reason]) == (503, "rejected-shutting-down")

    tell(story, tmp_path, engines=URLS[:1])


def test_a_request_that_is_expected_to_wait_for_too_long_is_shed(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        await asked(made)  # an idle replica serves in any case
        _, found = await asked(made)
        assert found.status == 429 and found.headers["retry-after"] == "1"
        assert found.json()["error"]["code"] == "shed"
        assert found.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"

    tell(story, tmp_path, engines=URLS[:1], policies={"shed_ttft_share": 1e-9}, slo={"ttft_s": 1.0})


def test_keys_are_checked_and_not_sent_to_engines(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        _, found = await asked(made)
        assert found.status == 401
        headers = {"authorization": "Bearer k", "x-gateway-inference-fairness-id": "other"}
        call, found = await asked(made, headers=headers)
        assert found.headers["authorization"] == "Bearer engine" and "x-api-key" in found.removed
        assert [request.live.tenant for request in made.gateway.driver.requests.values()] == ["acme"]
        call.answer(content_type="application/json")
        limits = set_headers((await call.response()).response_headers.response.header_mutation)
        assert limits["x-ratelimit-limit-requests"] == "1"
        _, found = await asked(made, headers=headers)
        assert found.status == 429 and int(found.headers["retry-after"]) > 0
        assert found.headers["x-llm-d-request-dropped-reason"] == "rejected-rate-limit-exceeded"

    keys = [{"sha256": digest("k"), "name": "acme", "requests_per_minute": 1}]
    tell(story, tmp_path, engines=URLS[:1], gateway={"api_keys": keys}, pool={"api_key": "engine"})


def test_requests_without_a_prompt_go_to_the_least_busy_replica(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        await asked(made)
        call = made.call()
        call.request(method="GET", path="/v1/models")
        told = (await call.response()).request_headers.response.header_mutation
        assert set_headers(told) == {"x-gateway-destination-endpoint": ENDPOINTS[1]}
        call.answer(content_type="application/json")
        await call.response()
        call.part(b"{}", is_last=True)
        assert (await call.response()).response_body.response.body_mutation.streamed_response.body == b"{}"
        assert in_flight(made) == [1, 0]
        for mode in (DUPLEX, BUFFERED):
            call, found = await asked(made, (mode, NONE), path="/v1/load_lora_adapter", body=b"x" * 200_000)
            assert found.endpoints == [ENDPOINTS[1]] and found.body == (b"x" * 200_000 if mode == DUPLEX else None)

    tell(story, tmp_path, engines=URLS[:2], policies={"routing": "least-loaded"})


def test_without_response_bodies_the_end_of_the_call_is_the_end_of_the_answer(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call, found = await asked(made, (DUPLEX, NONE), body={**CHAT, "stream": True})
        assert "stream_options" not in found.json()
        call.answer(content_type="text/event-stream")
        await call.response()
        assert sum(in_flight(made)) == 1
        call.end()
        await made.over()
        assert sum(in_flight(made)) == 0
        assert made.gateway.telemetry.records().requests["outcome"].tolist() == [Outcome.FINISHED]

    tell(story, tmp_path)


def test_long_and_compressed_bodies(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        body = {**CHAT, "messages": [{"role": "user", "content": "word " * 8000}]}
        raw = msgspec.json.encode(body)
        _, found = await asked(made, body=raw)
        assert found.json() == body
        packed = gzip.compress(raw)
        _, found = await asked(made, body=packed, headers={"content-encoding": "gzip"})
        assert found.body == packed

    tell(story, tmp_path)


def test_a_request_with_trailers_ends_with_them(tmp_path: Path) -> None:
    async def story(made: Desk) -> None:
        call = made.call()
        call.send(request_headers=headers_message({":method": "POST", ":path": "/v1/chat/completions"}))
        call.send(request_body=pb.HttpBody(body=msgspec.json.encode(CHAT)))
        call.send(request_trailers=pb.HttpTrailers())
        assert (await call.response()).WhichOneof("response") == "request_headers"
        body = (await call.response()).request_body.response.body_mutation.streamed_response
        assert msgspec.json.decode(body.body) == CHAT and not body.end_of_stream
        assert (await call.response()).WhichOneof("response") == "request_trailers"

    tell(story, tmp_path)


def test_a_pair_is_told_by_the_decoder_s_address_and_the_header_of_llm_d(tmp_path: Path) -> None:
    combo = {
        "name": "pair",
        "prefill": {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": URLS[:1]},
        "decode": {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15", "endpoints": URLS[1:2]},
    }

    async def story(made: Desk) -> None:
        call, found = await asked(made, body={**CHAT, "stream": True}, headers={"x-prefiller-host-port": "evil:1"})
        assert found.endpoints == [ENDPOINTS[1]] and found.headers["x-prefiller-host-port"] == ENDPOINTS[0]
        assert in_flight(made) == [1, 1]
        call.answer(content_type="text/event-stream")
        call.part(chunk("a"))
        for _ in range(2):
            await call.response()
        assert in_flight(made) == [0, 1]
        call.part(chunk("b") + b"data: [DONE]\n\n", is_last=True)
        await call.response()
        assert in_flight(made) == [0, 0]

    path = tmp_path / "fleet.yaml"
    path.write_text(
        yaml.safe_dump({"combos": [combo], "policies": {"routing": {"name": "cauchy", "within": "strict"}}})
    )

    async def run() -> None:
        async with desk(path) as made:
            await story(made)

    asyncio.run(run())
