"""Requests that are shed: by the gateway as in a simulation, and what their clients are told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httptools")
pytest.importorskip("uvicorn")

import serving
from headway.core.record import Outcome
from picker_days import day_of, decide_alike
from serving import chat, metric, until
from virtual_time import both

URLS = ["http://127.0.0.1:10001"]


def test_the_gateway_sheds_what_a_simulation_sheds(tmp_path: Path) -> None:
    day = day_of({"routing": "headway", "shed_ttft_share": 1.0}, URLS, num_requests=40)
    day["slo"] = {"ttft_s": 0.035}
    ran, chosen, foreseen, simulated = both(day, tmp_path)
    assert decide_alike(chosen, simulated)
    outcomes, simulated_outcomes = (
        each.requests["outcome"][each.requests["request"].argsort()] for each in (ran, foreseen)
    )
    assert (outcomes == simulated_outcomes).all() and {*outcomes} == {Outcome.FINISHED, Outcome.REJECTED}


def test_a_worker_tells_the_client_of_a_request_that_is_shed(tmp_path: Path) -> None:
    engine = serving.emulator()
    path = serving.fleet_file(tmp_path, [engine.url], policies={"shed_ttft_share": 1e-9}, slo={"ttft_s": 1.0})
    front = serving.gateway(path, "--workers", "2")
    replies: list[serving.Reply] = []

    def is_shed() -> bool:
        """On a busy machine the engine may count as down for a moment, in which none is shed."""
        replies.append(chat(front, max_tokens=1))
        return replies[-1].status == 429

    with serving.closing(engine, front):
        serving.all_up(front, 1)
        running = chat(front, max_tokens=30_000, ignore_eos=True, stream=True)  # an idle replica serves in any case
        until(lambda: metric(front, "headway_requests_in_flight") == 1)
        until(is_shed)
        assert replies[-1].headers["retry-after"] == "1"
        error = replies[-1].json()["error"]
        assert (error["code"], error["type"]) == ("shed", "rate_limit_error")
        running.close()
