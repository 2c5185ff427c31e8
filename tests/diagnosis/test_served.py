"""Slow requests of a gateway with emulated engines: one id in all that is written, and the cause by its name."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("httptools")
pytest.importorskip("openai")

import batching
import headway as hw
import serving
from headway import diagnosis
from headway.api.slow_requests import Why
from headway.core.record import LONGEST_GAP, RESUMED
from headway.metrics.latency import DefaultSlo, Sample
from serving import MODEL, metric, send, until

OTHER = "llama-3.1-8b"
WAIT_S = 2.5
"""So long a request is kept waiting: far longer than all else that it needs."""
LONG_TOKENS = 36_000


_closed = pytest.fixture(autouse=True, scope="module")(batching.closed)


class Day:
    """A served day: what it has written, the headers of its answers, and the ids of a batch's lines."""

    def __init__(self, folder: Path, headers: dict[str, dict[str, str]], batch: list[str]) -> None:
        self.folder, self.headers, self.batch = folder, headers, batch
        self.records, self.decisions = folder / "records", folder / "decisions.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def why(self, request: str) -> Why:
        return hw.why(self.records, request, decisions=self.decisions)


def completion(front: serving.Process, id: str, model: str = MODEL, **options: Any) -> serving.Reply:
    body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, **options}
    return send(front, "/v1/completions", body, {"x-request-id": id} if id else {})


def held_requests(front: serving.Process) -> None:
    """One that waits until another one's client has left."""
    first = completion(front, "first", stream=True, max_tokens=4000, ignore_eos=True)
    next(first.events())
    waits = threading.Thread(target=lambda: list(completion(front, "held", stream=True).events()))
    waits.start()
    until(lambda: metric(front, "headway_requests_held") == 1)
    time.sleep(WAIT_S)
    first.close()
    waits.join()


def failing_request(front: serving.Process, engine: serving.Process) -> None:
    """One whose engine is killed before it has answered."""
    fails = threading.Thread(target=lambda: list(completion(front, "fails", OTHER, stream=True).events()))
    fails.start()
    until(lambda: metric(front, "headway_requests_in_flight") == 1)
    time.sleep(WAIT_S)
    engine.kill()
    fails.join()


def continued_request(front: serving.Process, engines: dict[str, serving.Process]) -> dict[str, str]:
    """One whose engine is killed after its first tokens: the headers of its answer."""
    reply = serving.chat(
        front, headers={"x-request-id": "continued"}, model=OTHER, stream=True, max_tokens=100, ignore_eos=True
    )
    events = reply.events()
    next(events)
    engines[reply.headers["x-headway-replica"]].kill()
    assert list(events)[-1] == "[DONE]"
    return reply.headers


def batch_ids(front: serving.Process) -> list[str]:
    """The ids of two requests of a batch, by its output file."""
    who = batching.client(front)
    batch = batching.ended(who, batching.begin(who, batching.jsonl([batching.line("a"), batching.line("b")])))
    return [each["response"]["request_id"] for each in batching.answers(who, batch.output_file_id)]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "workers"])
def day(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    folder = tmp_path_factory.mktemp("day")
    engine = serving.emulator()
    slow, fast, last = (
        serving.Process("-m", "headway", "emulate", "--model", OTHER, "--gpu", "h100", "--port", "0", *more)
        for more in (("--speed", "0.0001"), (), ())
    )
    with serving.closing(engine, slow, fast, last):
        pools = [("one", MODEL, [engine.url]), ("two", OTHER, [slow.url, fast.url, last.url])]
        fleet = [
            {"name": name, "model": model, "gpu": "h100", "engine": "vllm-0.15", "endpoints": urls}
            for name, model, urls in pools
        ]
        policies = {"routing": "least-loaded", "window": 1, "ordering": "fcfs", "ordering_at": "gateway"}
        file = folder / "fleet.yaml"
        file.write_text(
            yaml.safe_dump(
                {
                    "fleet": fleet,
                    "policies": policies,
                    "gateway": {"scrape_period_s": 0.1, "batches": {}},
                }
            )
        )
        front = serving.gateway(
            file,
            "--records",
            str(folder / "records"),
            "--decisions",
            str(folder / "decisions.jsonl"),
            "--access-log",
            str(folder / "access.jsonl"),
            "--workers",
            str(request.param),
        )
        with serving.closing(front):
            serving.all_up(front, 4)
            headers: dict[str, dict[str, str]] = {}
            for id in ("whole", "", "again", "again"):
                reply = completion(front, id)
                headers[id], _ = reply.headers, reply.json()
            held_requests(front)
            list(completion(front, "several", n=4, max_tokens=50, ignore_eos=True, stream=True).events())
            list(completion(front, "long", prompt=[7] * LONG_TOKENS, stream=True).events())
            failing_request(front, slow)
            serving.all_up(front, 3)
            headers["continued"] = continued_request(front, {"two/2": fast, "two/3": last})
            batch = batch_ids(front)
            front.stop()
        yield Day(folder, headers, batch)


def test_one_id_is_in_all_that_is_written(day: Day) -> None:
    ours = day.headers[""]["x-request-id"]
    assert day.headers["whole"]["x-request-id"] == "whole" and len(ours) == 32
    history = diagnosis.read(day.records)
    recorded = [history.request_id(row) for row in history.rows]
    expected = ["whole", ours, "again", "again", "first", "held", "several", "long", "fails", "continued"]
    assert len(day.batch) == 2 and sorted(recorded) == sorted([*expected, *day.batch])
    access = [line for line in day.lines("access.jsonl") if line["path"].endswith("completions")]
    assert sorted(line["request_id"] for line in access) == sorted(expected)
    placed = [line for line in day.lines("decisions.jsonl") if line["what"] == "placed"]
    assert sorted({line["request"] for line in placed}) == sorted({*expected, *day.batch})
    by_id = {line["request_id"]: line["replica"] for line in access}
    for id in ("whole", ours, "held", "long", "fails", "continued"):
        found = day.why(id).requests[0]
        assert found.replica == by_id[id]
        assert found.decisions is not None and found.decisions[-1].replica == by_id[id]


def test_a_held_request_was_held(day: Day) -> None:
    found = day.why("held").requests[0]
    assert found.biggest == "held" and found.cause == "the gateway held it: no replica has room"
    assert found.terms[0].seconds is not None and found.terms[0].seconds > WAIT_S / 2


def test_a_request_whose_engine_was_killed_failed_over(day: Day) -> None:
    why = day.why("fails")
    found = why.requests[0]
    assert found.biggest == "failover" and found.attempts == 2
    assert found.cause == "it failed once, at two/1, and went on elsewhere"
    assert [(stay.replica, stay.ended) for stay in found.stays] == [("two/1", "crashed"), ("two/2", "finished")]
    assert found.decisions is not None
    assert [each.replica for each in found.decisions] == ["two/1", "two/2"]
    assert [each.replica for each in found.decisions[0].candidates] == ["two/1", "two/2", "two/3"]
    chosen = {each.router: each for each in found.decisions[0].others}
    assert chosen["least-loaded"].replica == "two/1" and chosen["random"].replica is None
    assert "failover" in why.table() and "two/2" in why.table()


def test_an_answer_that_went_on_elsewhere_has_two_stays(day: Day) -> None:
    found = day.why("continued").requests[0]
    first = day.headers["continued"]["x-headway-replica"]
    (other,) = {"two/2", "two/3"} - {first}
    assert [(stay.replica, stay.ended) for stay in found.stays] == [(first, "crashed"), (other, "finished")]
    history = diagnosis.read(day.records)
    resumed_s = history.value(RESUMED, found.row) - found.arrival_s
    assert found.ttft_s is not None and found.ttft_s < found.stays[0].to_s <= found.stays[1].from_s < resumed_s
    times = {term.term: term.seconds for term in found.terms}
    assert times["failover"] == pytest.approx(resumed_s - found.stays[0].to_s)
    assert history.value(LONGEST_GAP, found.row) > 0


def test_a_long_prompt_is_the_cause(day: Day) -> None:
    found = day.why("long").requests[0]
    assert found.biggest == "first token" and found.cause.startswith(f"its prompt of {LONG_TOKENS:,} tokens")
    queue = next(term for term in found.terms if term.term == "queue")
    assert queue.seconds is None, "the engine does not tell"


def test_the_tokens_of_four_sequences_came_at_the_same_time(day: Day) -> None:
    """Their TPOT is one sequence's, wherever it is read."""
    found = day.why("several").requests[0]
    assert found.output_tokens == 200 and found.ttft_s is not None and found.tpot_s is not None
    assert found.tpot_s == pytest.approx((found.e2e_s - found.ttft_s) / 49)
    loaded = diagnosis.read(day.records).records
    (row,) = np.flatnonzero(loaded.requests["request"] == found.row)
    measured = Sample(loaded, np.array([row]), DefaultSlo(), None)
    assert measured.tpot_s.tolist() == pytest.approx([found.tpot_s])
    decode = next(term for term in found.terms if term.term == "decode")
    assert decode.seconds is not None and decode.expected_s is not None
    assert decode.expected_s < 2 * decode.seconds, "49 tokens are expected, not 199"


def test_what_is_not_known_is_said(day: Day) -> None:
    found = day.why("whole").requests[0]
    assert found.ttft_s is None and found.tpot_s is None
    assert [term.term for term in found.terms] == ["held", "engine"] and "not streamed" in found.notes[0]
    assert len(day.why("again").requests[0].same_id) == 1
    with pytest.raises(hw.HeadwayError, match=r"no request 'agian'; the nearest are again"):
        day.why("agian")
    without = hw.why(day.records, "long").requests[0]
    assert without.decisions is None and any("--decisions" in note for note in without.notes)


def test_the_slowest_come_first_and_their_terms_are_the_whole(day: Day) -> None:
    found = hw.why(day.records, slowest=100, decisions=day.decisions).requests
    assert len(found) == 12
    assert [each.e2e_s for each in found] == sorted((each.e2e_s for each in found), reverse=True)
    for each in found:
        assert sum(term.seconds or 0.0 for term in each.terms) == pytest.approx(each.e2e_s)
        assert each.router == "least-loaded" and each.decisions is not None
        for decision in each.decisions:  # rehearsed, the fleet's own router chooses what it chose
            answers = {other.router: other.replica for other in decision.others}
            assert answers["least-loaded"] == decision.replica
    by_ttft = hw.why(day.records, slowest=3, by="ttft").requests
    assert {each.request for each in by_ttft} == {"held", "long", "fails"}
