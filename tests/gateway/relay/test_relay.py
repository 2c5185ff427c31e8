"""A relay between a client and engines in memory."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.core.record import Outcome
from headway.gateway.relay.request import RESPONSES
from headway.gateway.scheduling.in_flight import ReleaseReason
from headway.gateway.scheduling.request_state import Assignment
from in_memory import Serve, answering, run, streaming
from relay_alone import OrderedScheduler, chat_request, engine, relay_of
from scripted import OK, Exchange, chunk, event

USAGE = {"id": "c", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}


def test_a_stream_is_passed_on_event_by_event() -> None:
    async def story() -> None:
        scheduler = OrderedScheduler([engine(0, streaming(chunk("so"), chunk("on"), USAGE))])
        relay, writer, health = relay_of(chat_request(stream=True), scheduler)
        await relay.run()
        assert writer.status == 200 and writer.is_complete and len(writer.pieces) == 3
        assert writer.events() == [chunk("so"), chunk("on"), "[DONE]"]
        assert writer.headers["content-type"] == "text/event-stream" and writer.headers["x-request-id"] == "r1"
        assert writer.headers["x-headway-replica"] == "pool/0"
        assert scheduler.reasons == [ReleaseReason.FINISHED] and relay.in_flight.reservation is None
        assert health.reports == [("pool/0", "succeeded")]
        assert (relay.partial.prompt_tokens, relay.in_flight.used_tokens, scheduler.reservations[0].tokens) == (7, 9, 2)

    run(story())


def test_usage_goes_to_clients_that_asked_for_it() -> None:
    async def story() -> None:
        request = chat_request(stream=True, stream_options={"include_usage": True})
        relay, writer, _ = relay_of(request, OrderedScheduler([engine(0, streaming(chunk("so"), USAGE))]))
        await relay.run()
        assert writer.events() == [chunk("so"), USAGE, "[DONE]"]

    run(story())


def test_fields_that_only_the_gateway_asked_for_are_hidden() -> None:
    async def story() -> None:
        bodies: list[Any] = []
        first = chunk("so", token=3, prompt_token_ids=[1, 2])
        relay, writer, _ = relay_of(
            chat_request(stream=True), OrderedScheduler([engine(0, streaming(first, bodies=bodies))])
        )
        await relay.run()
        assert bodies[0]["return_token_ids"] is True and bodies[0]["stream_options"] == {"include_usage": True}
        assert bodies[0]["priority"] == 0
        assert writer.events() == [chunk("so"), "[DONE]"]

    run(story())


def test_a_broken_stream_continues_elsewhere_from_its_tokens() -> None:
    async def story() -> None:
        bodies: list[Any] = []
        broken = streaming(chunk("so", token=3, prompt_token_ids=[1, 2]), chunk(" it", token=4), end=None)
        rest = {"id": "d", "choices": [{"index": 0, "text": " goes", "token_ids": [5], "finish_reason": "stop"}]}
        usage = {"id": "d", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
        scheduler = OrderedScheduler([engine(0, broken), engine(1, streaming(rest, usage, bodies=bodies))])
        request = chat_request(stream=True, stream_options={"include_usage": True}, temperature=0)
        relay, writer, health = relay_of(request, scheduler)
        await relay.run()
        assert writer.text() == "so it goes" and writer.events()[-1] == "[DONE]"
        *chunks, last, _ = writer.events()
        assert {each["id"] for each in chunks} == {"c"} and not any("token_ids" in c["choices"][0] for c in chunks)
        assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        assert bodies[0]["prompt"] == [1, 2, 3, 4] and bodies[0]["max_tokens"] == 8 and bodies[0]["temperature"] == 0
        assert scheduler.reasons == [ReleaseReason.FAILED, ReleaseReason.FINISHED]
        assert health.reports == [("pool/0", "broke off the connection"), ("pool/1", "succeeded")]
        assert writer.headers["x-headway-replica"] == "pool/0"

    run(story())


def test_an_answer_that_was_complete_when_its_stream_broke_only_ends() -> None:
    async def story() -> None:
        whole = chunk("so", token=3)
        whole["choices"][0]["finish_reason"] = "stop"
        bodies: list[Any] = []
        replicas = [engine(0, streaming(whole, end=None)), engine(1, streaming(bodies=bodies))]
        relay, writer, _ = relay_of(chat_request(stream=True), OrderedScheduler(replicas))
        await relay.run()
        assert writer.text() == "so" and writer.events()[-1] == "[DONE]" and not bodies

    run(story())


def test_a_stream_that_cannot_continue_ends_with_an_error() -> None:
    async def story() -> None:
        scheduler = OrderedScheduler([engine(0, streaming(chunk("so"), end=None)), engine(1, streaming(chunk("on")))])
        relay, writer, _ = relay_of(chat_request(stream=True, tools=[{"type": "function"}]), scheduler)
        await relay.run()
        first, error, done = writer.events()
        assert first == chunk("so") and done == "[DONE]" and writer.is_complete
        assert error["error"]["message"] == "pool/0 broke off the connection"
        assert scheduler.reasons == [ReleaseReason.REFUSED]

    run(story())


def test_events_before_an_error_are_written() -> None:
    message = "reported an error"

    async def story() -> None:
        both = event(chunk("so")) + event({"error": {"message": "no"}})

        async def serve(exchange: Exchange) -> None:
            exchange.send(OK + both)

        scheduler = OrderedScheduler([engine(0, serve)])
        relay, writer, health = relay_of(chat_request(stream=True), scheduler, max_attempts=1)
        await relay.run()
        assert writer.text() == "so" and message in writer.events()[1]["error"]["message"]
        assert message in health.reports[0][1]

    run(story())


def test_an_engines_refusal_is_the_clients_response() -> None:
    async def story() -> None:
        scheduler = OrderedScheduler([engine(0, answering(b'{"message":"too long"}', 400))])
        relay, writer, health = relay_of(chat_request(stream=True), scheduler)
        await relay.run()
        assert writer.status == 400 and json.loads(writer.body)["error"]["message"] == "too long"
        assert scheduler.reasons == [ReleaseReason.REFUSED] and health.reports == [("pool/0", "succeeded")]

    run(story())


@pytest.mark.parametrize(
    ("second", "status", "reports"),
    [
        (answering({"choices": []}), 200, ['pool/0 answered 401: {"error": {"message": "no"}}', "succeeded"]),
        (answering({"error": {"message": "no"}}, 404), 404, ["succeeded"]),
        (answering({"error": {"message": "no"}}, 500), 401, ['answered 500: {"error": {"message": "no"}}']),
        (None, 401, []),
    ],
    ids=["a peer answers", "a peer refuses", "a peer fails", "no peer"],
)
def test_an_unconfirmed_refusal_is_the_clients_unless_another_replica_answers(
    second: Serve | None, status: int, reports: list[str]
) -> None:
    async def story() -> None:
        engines = [engine(0, answering({"error": {"message": "no"}}, 401))]
        engines += [] if second is None else [engine(1, second)]
        relay, writer, health = relay_of(chat_request(), OrderedScheduler(engines))
        relay.in_flight.assignment = Assignment(has_alternative=True)
        await relay.run()
        assert writer.status == status and writer.is_complete
        assert [what.removeprefix("pool/0 ") for _, what in health.reports] == [
            report.removeprefix("pool/0 ") for report in reports
        ]

    run(story())


def test_ordinary_refusals_are_believed_for_a_while_after_a_peer_has_confirmed_one() -> None:
    async def story() -> None:
        served: list[int] = []

        def refusing(id: int) -> Serve:
            async def refuse(exchange: Exchange) -> None:
                served.append(id)
                exchange.answer(b"{}", 400)

            return refuse

        both = engine(0, refusing(0)), engine(1, refusing(1))
        relay, writer, known = relay_of(chat_request(), OrderedScheduler(both))
        for num in range(6):
            if num:
                relay, writer, _ = relay_of(chat_request(), OrderedScheduler(both))
                relay._health = known
            relay.in_flight.assignment = Assignment(has_alternative=True)
            await relay.run()
            assert writer.status == 400
        assert served == [0, 1, 0, 0, 0, 0, 1, 0]

    run(story())


def test_an_overload_is_retried_elsewhere_until_no_attempt_is_left() -> None:
    async def story() -> None:
        busy = answering(b"busy", 503)
        scheduler = OrderedScheduler([engine(i, busy) for i in range(5)])
        relay, writer, _ = relay_of(chat_request(), scheduler, max_attempts=2)
        await relay.run()
        assert scheduler.reasons == [ReleaseReason.FAILED_BEFORE_FETCH, ReleaseReason.REFUSED]
        assert writer.status == 503 and writer.headers["retry-after"] == "1"
        assert json.loads(writer.body)["error"]["message"] == "pool/1 answered 503: busy"

    run(story())


@pytest.mark.parametrize(("is_shed", "status", "code"), [(False, 503, "no_capacity"), (True, 429, "shed")])
def test_without_replicas_the_client_is_told_to_come_back(is_shed: bool, status: int, code: str) -> None:
    async def story() -> None:
        relay, writer, _ = relay_of(chat_request(), OrderedScheduler([]))
        relay.in_flight.retry_after_s, relay.in_flight.is_shed = 9, is_shed
        await relay.run()
        assert writer.status == status and writer.headers["retry-after"] == "9"
        assert json.loads(writer.body)["error"]["code"] == code

    run(story())


def test_an_answer_that_is_not_streamed_is_passed_on_unchanged() -> None:
    async def story() -> None:
        body = (
            b'{"id":"c","choices":[{"message":{"content":"fine"}}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
        )
        scheduler = OrderedScheduler([engine(0, answering(body))])
        request = chat_request({"x-headway-explain": "1"})
        relay, writer, _ = relay_of(request, scheduler)
        relay.in_flight.live.placed_s = 0.5
        await relay.run()
        assert writer.body == body and writer.headers["content-length"] == str(len(body))
        assert writer.headers["x-headway-held-s"] == "0.500000" and writer.headers["x-headway-attempts"] == "1"
        assert relay.in_flight.answer.is_unstreamed and relay.in_flight.used_tokens == 10

    run(story())


def test_a_passthrough_stream_is_unchanged_and_counted() -> None:
    async def story() -> None:
        events = [
            {"type": "response.created"},
            {"type": "response.output_text.delta", "delta": "so"},
            {"type": "response.completed", "response": {"usage": {"input_tokens": 4, "output_tokens": 2}}},
        ]
        request = chat_request(path=RESPONSES, input="hi", stream=True)
        scheduler = OrderedScheduler([engine(0, streaming(*events, end=b"0\r\n\r\n"))])
        relay, writer, _ = relay_of(request, scheduler)
        await relay.run()
        assert writer.events() == events and relay.in_flight.used_tokens == 6

    run(story())


def test_the_engine_gets_the_clients_trace_and_key() -> None:
    async def story() -> None:
        seen: list[dict[str, str]] = []

        async def serve(exchange: Exchange) -> None:
            seen.append(exchange.headers)
            exchange.answer(b"{}")

        request = chat_request({"authorization": "Bearer k", "traceparent": "00-1", "cookie": "no"})
        relay, _, _ = relay_of(request, OrderedScheduler([engine(0, serve)]))
        await relay.run()
        assert (seen[0]["authorization"], seen[0]["traceparent"], seen[0]["x-request-id"]) == ("Bearer k", "00-1", "r1")
        assert "cookie" not in seen[0]

    run(story())


def test_a_client_that_disconnects_closes_the_engines_connection() -> None:
    async def story() -> None:
        closed = asyncio.Event()

        async def serve(exchange: Exchange) -> None:
            exchange.send(OK + event(chunk("so")))
            await exchange.left()
            closed.set()

        scheduler = OrderedScheduler([engine(0, serve)])
        relay, writer, health = relay_of(chat_request(stream=True), scheduler)
        running = asyncio.create_task(relay.run())
        while not writer.pieces:
            await asyncio.sleep(0)
        relay.client_disconnected()
        await closed.wait()
        await running
        assert relay.in_flight.outcome is Outcome.CANCELLED and not health.reports

    run(story())


@pytest.mark.parametrize(("score", "text"), [(80.0, "fine"), (20.0, "better")])
def test_a_cascades_answer_is_written_once_it_is_accepted(score: float, text: str) -> None:
    async def story() -> None:
        replicas = [engine(0, streaming(chunk("fine"))), engine(1, streaming(chunk("better")))]
        scheduler = OrderedScheduler(replicas, scores=[score])
        relay, writer, _ = relay_of(chat_request(stream=True), scheduler)
        await relay.run()
        assert writer.text() == text and writer.events()[-1] == "[DONE]" and scheduler.scored == ["fine"]

    run(story())
