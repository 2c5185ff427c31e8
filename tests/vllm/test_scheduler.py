"""The scheduler over a stand-in for vLLM, the simulator, and vLLM's own recorded decisions: all three are one."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_stand_in
from headway.core.errors import HeadwayError
from headway.core.request import Request
from headway.core.view import RequestView
from headway.vllm.counts import passed_on
from headway.vllm.settings import VARIABLE
from iterations import BLOCK, ORDERINGS, Engine, Iterations, arrivals, described, simulated
from vllm_stand_in import ANSWER, END

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())["iterations"]
REQUESTS = arrivals(40, 3.0, 150, 40)
ENGINES = {"seats": Engine(4, 400), "memory": Engine(6, 17)}
CASES = [(limit, name) for limit in ENGINES for name in ORDERINGS]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def vllm() -> Iterator[None]:
    with vllm_stand_in.installed():
        yield


def recorded(limit: str, name: str) -> Iterations:
    found = []
    for text in RECORDED[limit][name].split(" "):
        pairs = [each.partition(":") for each in text.split(",")]
        found.append([(int(id), int(tokens or 1)) for id, _, tokens in pairs])
    return found


def scheduler(ordering: Any, engine: Engine, **config: Any) -> Any:
    from headway.vllm import Scheduler

    given = {"headway_ordering": ordering, "headway_reasoning_end": END, **config}
    settings = SimpleNamespace(additional_config=given, reasoning_config=None)
    return Scheduler(settings, engine.seats, engine.blocks, BLOCK, engine.budget)


def played(one: Any, requests: list[Request], late: int = 0) -> Iterations:
    """The iterations of a scheduler, of a second each. `late`: preempted requests' last tokens come so much later."""
    coming, seen, now = described(requests), list[list[tuple[int, int]]](), 0.0
    reasoning = {id: 0 for id in one.requests} | {str(each["id"]): each["reasoning_tokens"] for each in coming}
    one.clock = lambda: now
    while coming or one.requests:
        if not one.requests:
            now = max(now, coming[0]["arrival_s"])
        while coming and coming[0]["arrival_s"] <= now:
            one.add_request(request_of(coming.pop(0)))
        output = one.schedule()
        assert output.num_scheduled_tokens, "the scheduler is stuck"
        seen.append(sorted((int(id), tokens) for id, tokens in output.num_scheduled_tokens.items()))
        now += 1.0
        sampled = {}
        for id in output.num_scheduled_tokens:
            request = one.requests[id]
            if not request.is_prefill_chunk:
                sampled[id] = END if len(request._output_token_ids) + 1 == reasoning[id] else ANSWER
        one.update_from_output(output, sampled)
    return seen


def request_of(each: dict[str, Any]) -> vllm_stand_in.Request:
    prompt = [ANSWER] * each["prompt_tokens"]
    if not each["reasoning_tokens"]:
        prompt[-1] = END
    extra = {key: value for key, value in each.items() if key.startswith("headway_")}
    return vllm_stand_in.Request(str(each["id"]), prompt, each["output_tokens"], each["arrival_s"], each["tier"], extra)


@pytest.mark.parametrize(("limit", "name"), CASES)
def test_simulator_decides_as_vllm_did(limit: str, name: str) -> None:
    assert simulated(REQUESTS, ORDERINGS[name], ENGINES[limit]) == recorded(limit, name)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("limit", "name"), CASES)
def test_scheduler_decides_as_vllm_did(limit: str, name: str) -> None:
    assert played(scheduler(ORDERINGS[name], ENGINES[limit]), REQUESTS) == recorded(limit, name)


class FailsLater:
    """Raises when it has ranked the tenth request."""

    quantum: int | None = None
    preemptive = True

    def rank(self, request: RequestView, now: float) -> tuple[int, float]:
        if request.id >= 10:
            raise ValueError("no more")
        return -request.id, request.arrival_s


class Incomparable(FailsLater):
    """Ranks cannot be compared with one another from the tenth on."""

    def rank(self, request: RequestView, now: float) -> Any:
        return (None,) if request.id >= 10 else (request.id,)


class FailsInQueue(FailsLater):
    """The other methods raise."""

    num_queues = 2

    def rank(self, request: RequestView, now: float) -> tuple[int]:
        return (request.id,)

    def queue(self, request: RequestView) -> int:
        return 1 // (10 - request.id)


class FailsWithTime(FailsInQueue):
    def queue(self, request: RequestView) -> int:
        return 0

    def next_change(self, request: RequestView, now: float) -> float | None:
        return 1 / (request.id - 10)


class FailsWithTokens(FailsWithTime):
    def next_change(self, request: RequestView, now: float) -> float | None:
        return None

    def next_change_tokens(self, request: RequestView) -> int | None:
        return 1 // (10 - request.id)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("broken", [FailsLater, Incomparable, FailsInQueue, FailsWithTime, FailsWithTokens])
def test_ordering_that_fails_leaves_an_engine_that_goes_on_as_fcfs(
    broken: type[FailsLater], caplog: pytest.LogCaptureFixture
) -> None:
    one = scheduler({"name": broken}, ENGINES["seats"])
    with caplog.at_level(logging.ERROR):
        seen = played(one, REQUESTS)
    assert one.ranking.num_failures == 1 and one.ranking.name == "fcfs"
    (line,) = [record.message for record in caplog.records]
    assert line == f"ordering {broken.__name__} failed; requests go on as fcfs"
    firsts = list(dict.fromkeys(id for each in seen for id, _ in each))
    assert set(firsts) == set(range(len(REQUESTS))), "all requests were served"
    assert [id for id in firsts if id > 14] == list(range(15, len(REQUESTS))), "in order of arrival"


@pytest.mark.usefixtures("vllm")
def test_requests_preempted_with_tokens_under_way_are_ranked_anew_as_these_come() -> None:
    one = scheduler("shortest-remaining", Engine(1, 100))
    played(one, [])
    now = 0.0
    one.clock = lambda: now
    long, short = (request_of(each) for each in described([Request(0, 0.0, 10, 20), Request(1, 1.0, 10, 5)]))
    one.add_request(long)
    output = one.schedule()
    one.update_from_output(output, {"0": ANSWER})
    one.add_request(short)
    long.num_in_flight_tokens = 1
    output = one.schedule()
    assert list(output.num_scheduled_tokens) == ["1"], "the longer one was preempted"
    before = one.waiting._heap[0][0]
    long.num_in_flight_tokens, long.num_stale_output_tokens = 0, 1
    one.update_from_output(output, {"1": ANSWER})
    long._output_token_ids.append(ANSWER)  # what was under way
    long.num_stale_output_tokens = 0
    one.schedule()
    assert before[0] - one.waiting._heap[0][0][0] == 1 and not one._late


@pytest.mark.usefixtures("vllm")
def test_requests_that_leave_the_queue_are_gone() -> None:
    one = scheduler("priority", Engine(1, 100))
    three = [request_of(each) for each in described([Request(id, float(id), 10, 5, tier=3 - id) for id in range(3)])]
    for each in three:
        one.add_request(each)
    assert [each.request_id for each in one.waiting] == ["2", "1", "0"] and len(one.waiting) == 3
    one.waiting.remove_requests({three[1]})
    one.waiting.remove_request(three[2])
    assert list(one.waiting) == [three[0]] == [one.waiting.pop_request()] and not one.waiting


@pytest.mark.parametrize("version", ["0.24.0", "0.34.0", "0.320.1", "1.0"])
def test_unknown_version_of_vllm_is_refused(version: str) -> None:
    with vllm_stand_in.installed(version), pytest.raises(HeadwayError) as caught:
        scheduler("fcfs", ENGINES["seats"])
    known = "0.25, 0.26, 0.27, 0.28, 0.29, 0.30, 0.31, 0.32, 0.33"
    assert str(caught.value) == f"vLLM {version}: headway.vllm.Scheduler knows the scheduler of vLLM {known}"


@pytest.mark.usefixtures("vllm")
def test_before_031_the_first_by_rank_of_both_queues_is_admitted() -> None:
    """vLLM's own choice would admit all requests of its second queue first."""
    one = scheduler("priority", Engine(1, 100))
    one.skipped_waiting = type(one.waiting)(one.ranking)
    requests = [request_of(each) for each in described([Request(id, float(id), 10, 5, tier=3 - id) for id in range(4)])]
    for each in requests:
        one.add_request(each)
    for each in requests[:2]:  # tiers 3 and 2
        one.waiting.remove_request(each)
        one.skipped_waiting.add_request(each)
    admitted = []
    while (queue := one._select_waiting_queue_for_scheduling()) is not None:
        admitted.append(queue.pop_request())
    assert admitted == requests[::-1]


@pytest.mark.usefixtures("vllm")
def test_before_032_counts_go_with_those_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an engine with adapters is refused there: their names would be among the adapters."""
    one = scheduler("fcfs", ENGINES["seats"])
    stats = SimpleNamespace(waiting_lora_adapters={})
    assert passed_on(stats) is stats.waiting_lora_adapters
    monkeypatch.setattr(type(one), "lora_config", object())
    scheduler("fcfs", ENGINES["seats"])
    monkeypatch.setattr(sys.modules["headway.vllm.scheduler"], "SchedulerStats", lambda: stats)
    with pytest.raises(HeadwayError, match=r"vLLM 0\.32\.0 with LoRA: .* expects 0\.32 or later"):
        scheduler("fcfs", ENGINES["seats"])


@pytest.mark.usefixtures("vllm")
def test_reasoning_ends_with_the_token_of_vllms_own_parser() -> None:
    from headway.vllm import Scheduler

    parser = SimpleNamespace(reasoning_start_token_ids=[3], natural_reasoning_end_token_ids=[4, 5])
    config = SimpleNamespace(additional_config={"headway_ordering": "pascal"}, reasoning_config=parser)
    one = Scheduler(config, 1, 100, BLOCK, 100)  # type: ignore[call-arg]
    assert (one.headway.reasoning_start, one.headway.reasoning_end) == ((3,), (4, 5))


@pytest.mark.usefixtures("vllm")
def test_counts_that_freeness_needs_are_exact() -> None:
    one = scheduler("priority", Engine(2, 100))
    requests = arrivals(3, 0.1, 100, 40)
    assert one.make_stats().num_kv_fetch_reqs_by_stage == {
        "headway:ordering_failures": 0,
        "headway:kv_blocks_used": 0,
        "headway:kv_blocks_total": 100,
        "headway:kv_blocks_demanded": 0,
    }
    for each in described(requests):
        one.add_request(request_of(each))
    one.schedule()
    counts = one.make_stats().num_kv_fetch_reqs_by_stage
    (waiting,) = one.waiting
    running = [request for request in one.requests.values() if request is not waiting]
    assert counts["headway:kv_blocks_used"] == sum(-(-each.num_prompt_tokens // BLOCK) for each in running)
    assert counts["headway:kv_blocks_demanded"] == -(-waiting.num_prompt_tokens // BLOCK)
    tiers = {f"headway:requests/{each.tier}": sum(other.tier == each.tier for other in requests) for each in requests}
    assert {name: number for name, number in counts.items() if "/" in name} == tiers
    played(one, [])
    counts = one.make_stats().num_kv_fetch_reqs_by_stage
    assert counts["headway:kv_blocks_used"] == sum(counts[name] for name in tiers) == 0
    one.log_stats = False
    assert one.make_stats() is None


@pytest.mark.usefixtures("vllm")
def test_hints_that_cannot_be_read_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    one = scheduler("edf", ENGINES["seats"])
    one.add_request(vllm_stand_in.Request("a", [1], 1, 0.0, 0, {"headway_tier": "high", "temperature": 1}))
    assert one.num_bad_hints == 1
    assert caplog.messages[-1] == (
        "request a: headway_tier: expected a whole number of at least 0, got 'high'; it goes on without"
    )
