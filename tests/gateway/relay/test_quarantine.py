"""Requests that break engines, and engines that break under innocent requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.errors import ApiError
from headway.gateway.relay.quarantine import SURVIVED_TOKENS, BrokenEngines, Quarantine
from headway.gateway.upstream.engine import EngineEndpoint
from in_memory import run, streaming
from relay_alone import OrderedScheduler, chat_request, engine, relay_of
from scripted import Exchange, chunk


def _breaking(requests: list[int], num: int = 5) -> list[EngineEndpoint]:
    """Engines that answer health checks and break on a completion, which they count."""

    def made(id: int) -> EngineEndpoint:
        async def serve(exchange: Exchange) -> None:
            if exchange.path.startswith("/health"):
                exchange.answer(b"{}")
            else:
                requests.append(id)
                exchange.close()

        return engine(id, serve)

    return [made(id) for id in range(num)]


@pytest.mark.parametrize("is_kept", [False, True], ids=["new connections", "kept connections"])
@pytest.mark.parametrize("max_attempts", [1, 2, 3, 8])
def test_a_request_that_breaks_engines_is_never_sent_more_often_than_max_attempts(
    is_kept: bool, max_attempts: int
) -> None:
    async def story() -> None:
        requests: list[int] = []
        engines = _breaking(requests)
        if is_kept:
            for each in engines:
                await each.client.fetch("/health", 5.0)
        scheduler = OrderedScheduler(engines)
        relay, writer, _ = relay_of(chat_request(stream=True), scheduler, max_attempts)
        await relay.run()
        assert len(requests) <= max_attempts and len(set(requests)) <= 2
        assert writer.is_complete
        code = json.loads(writer.body)["error"]["code"]
        assert code == "request_quarantined" if len(set(requests)) == 2 else code == "engine_error"

    run(story())


def test_copies_of_a_quarantined_request_are_refused_for_a_while() -> None:
    async def story() -> None:
        requests: list[int] = []
        quarantine = Quarantine(60.0)
        request = chat_request(stream=True)
        relay, writer, _ = relay_of(request, OrderedScheduler(_breaking(requests)), 3, quarantine)
        await relay.run()
        assert writer.status == 422 and "pool/0 and pool/1 broke off" in json.loads(writer.body)["error"]["message"]
        now = OrderedScheduler.now
        with pytest.raises(ApiError, match="broke 2 engines and is quarantined"):
            quarantine.check(request.raw, now + 59)
        quarantine.check(b"another", now)
        quarantine.check(request.raw, now + 61)

    run(story())


def test_a_request_whose_engines_break_after_some_tokens_goes_on() -> None:
    """Two engines are restarted in one answer: the request had survived on both."""

    async def story() -> None:
        def tokens(first: int) -> list[Any]:
            return [chunk(f"{first + i} ", token=first + i) for i in range(SURVIVED_TOKENS)]

        engines = [engine(i, streaming(*tokens(10 * i), end=None)) for i in range(2)]
        engines.append(engine(2, streaming(chunk("end", token=99))))
        relay, writer, _ = relay_of(chat_request(stream=True), OrderedScheduler(engines))
        await relay.run()
        assert writer.events()[-1] == "[DONE]" and writer.text().endswith("end")

    run(story())


def test_a_body_that_was_answered_before_breaks_no_engine() -> None:
    """All engines are killed at once while many clients send the same: requests run on two of them."""

    async def story() -> None:
        requests: list[int] = []
        request, quarantine = chat_request(stream=True), Quarantine(60.0)
        good = engine(9, streaming(chunk("so", token=1)))
        relay, writer, _ = relay_of(request, OrderedScheduler([good]), 3, quarantine)
        await relay.run()
        assert writer.text() == "so" and quarantine.is_harmless(request.raw)
        relay, writer, _ = relay_of(request, OrderedScheduler([*_breaking(requests, 2), good]), 3, quarantine)
        await relay.run()
        assert requests == [0, 1] and writer.text() == "so"
        quarantine.check(request.raw, OrderedScheduler.now)

    run(story())


def test_an_engine_that_survives_the_request_clears_it() -> None:
    broken = BrokenEngines()
    for name, tokens in (("a", 0), ("a", 0), ("b", SURVIVED_TOKENS), ("a", 0)):
        broken.count(name, tokens)
        assert not broken.is_quarantined, "an engine that broke twice is one engine"
    broken.count("b", SURVIVED_TOKENS - 1)
    assert broken.is_quarantined


def test_quarantine_keeps_a_bounded_number_of_bodies() -> None:
    quarantine = Quarantine(60.0)
    for i in range(5000):
        quarantine.add(b"%d" % i, 0.0)
    quarantine.check(b"0", 1.0)
    with pytest.raises(ApiError):
        quarantine.check(b"4999", 1.0)
    Quarantine(0.0).check(b"x", 0.0)


def test_processes_that_tell_each_other_refuse_what_one_of_them_has_found_out() -> None:
    """And none tells again what it has been told, once all know."""
    processes = [Quarantine(60.0) for _ in range(3)]
    digests: list[bytes] = []

    def tell_others(digest: bytes, until_s: float) -> None:
        digests.append(digest)
        for other in processes:
            other.hold(digest, until_s)

    for each in processes:
        each.listeners.append(tell_others)
    processes[0].answered(b"well")
    processes[1].add(b"poison", 10.0)
    processes[1].add(b"well", 10.0)
    for each in processes:
        with pytest.raises(ApiError, match="quarantined"):
            each.check(b"poison", 69.0)
        each.check(b"poison", 71.0)
        each.check(b"another", 11.0)
    assert len(digests) == 2 * len(processes)
    processes[0].check(b"well", 11.0)
    with pytest.raises(ApiError, match="quarantined"):
        processes[2].check(b"well", 11.0)


def test_copies_that_run_already_are_not_sent_again() -> None:
    async def story() -> None:
        quarantine, requests = Quarantine(60.0), list[int]()
        request = chat_request(stream=True)
        relay, writer, _ = relay_of(request, OrderedScheduler(_breaking(requests)), 8, quarantine)
        quarantine.add(request.raw, OrderedScheduler.now)  # by another copy, while this one is at its first engine
        await relay.run()
        assert writer.status == 422 and len(requests) == 1

    run(story())
