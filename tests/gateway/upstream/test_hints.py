"""What engines with an ordering of Headway's are told of a request."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.control.live import Live
from headway.gateway.upstream.hints import add_order
from headway.policies.ordering.deadlines import EdfOrdering
from headway.policies.ordering.oracle import ShortestRemainingOrdering
from headway.vllm.request import HINTS, EngineRequest
from relay_alone import OrderedScheduler, chat_request, engine, relay_of
from scripted import Exchange
from vllm_stand_in import Request

EDF: Any = SimpleNamespace(engine_ordering="edf")


def hints_of(live: Live, given: Any = None, tokens: int = 0, now: float = 12.0) -> dict[str, Any]:
    body: dict[str, Any] = {} if given is None else {"vllm_xargs": given}
    request = SimpleNamespace(is_passthrough=False, slo_ttft_s=live.slo_ttft_s, slo_tpot_s=live.slo_tpot_s)
    add_order(body, request, live, EDF, False, tokens, now)
    hints: dict[str, Any] = body["vllm_xargs"]
    assert {name for name in hints if name.startswith("headway_")} <= set(HINTS)
    return hints


def in_engine(live: Live, hints: dict[str, Any], max_tokens: int, now: float = 12.0) -> EngineRequest:
    """The request as an engine's ordering sees it that receives it at once."""
    return EngineRequest(Request("a", [1] * live.prompt_tokens, max_tokens, now, live.tier, hints), (), ())  # type: ignore[arg-type]


def test_an_engine_ranks_by_deadline_as_the_gateway_does() -> None:
    edf = EdfOrdering()
    for slos in ({}, {"slo_ttft_s": 0.5}, {"slo_ttft_s": 0.5, "deadline_s": 11.5}, {"deadline_s": 40.0}):
        live = Live(0, 10.25, 5, 10, **slos)
        for since_s in (live.arrival_s, 11.25):  # as it came, or promoted by an admission policy
            live.tier_since_s = since_s
            seen = in_engine(live, hints_of(live), 10)
            assert edf.rank(seen, 12.0) == pytest.approx(edf.rank(live, 12.0)), slos


def test_the_length_that_is_left_counts() -> None:
    ordering, live = ShortestRemainingOrdering(), Live(0, 10.0, 5, 10)
    live.generated_tokens = 4
    # The body of a request that continues says `max_tokens` less what it has.
    assert ordering.rank(in_engine(live, hints_of(live, tokens=4), 6), 12.0) == (6, 10.0)
    given = {"headway_output_tokens": 8}
    assert ordering.rank(in_engine(live, hints_of(live, given, tokens=4), 6), 12.0) == (4, 10.0)


def test_the_clients_own_hints_go_first_but_not_its_arrival() -> None:
    live = Live(0, 10.0, 5, 10, slo_ttft_s=0.5)
    given = {"headway_slo_ttft_s": 3.0, "headway_waited_s": 1e6, "other": "x"}
    assert hints_of(live, given) == {"headway_slo_ttft_s": 3.0, "headway_waited_s": 2.0, "other": "x"}
    assert hints_of(live, "no object", now=9.0) == {"headway_slo_ttft_s": 0.5, "headway_waited_s": 0.0}


@pytest.mark.parametrize("ordering", ["edf", ""])
def test_headers_reach_the_engines_that_run_an_ordering(ordering: str) -> None:
    bodies: list[dict[str, Any]] = []

    async def serve(exchange: Exchange) -> None:
        bodies.append(json.loads(exchange.body))
        exchange.answer(b"{}")

    replica = engine(0, serve)
    replica.engine_ordering = ordering
    request = chat_request({"x-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "50"})
    asyncio.run(relay_of(request, OrderedScheduler([replica]))[0].run())
    hints = {"headway_slo_ttft_s": 0.25, "headway_slo_tpot_s": 0.05, "headway_waited_s": 1.0}
    assert bodies[0].get("vllm_xargs") == (hints if ordering else None)
