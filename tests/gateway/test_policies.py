"""Policies in front of engines: orderings, priorities, migration, admission, refusals and records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import serving
from headway import records, scenario
from headway.core.errors import HeadwayError
from headway.core.record import Outcome
from scripted import Exchange, ScriptedEngine, running
from serving import chat, metric, until

pytest.importorskip("httptools")


def _in_turn(front: serving.Process, first: Callable[[], serving.Reply], waiting: Callable[[int], bool]) -> list[str]:
    """One request runs; then tiers 5, 0, 3 arrive, in this order. In which order are they answered?"""
    running = first()
    order: list[str] = []

    def one(tier: int) -> None:
        chat(front, max_tokens=20, priority=tier).json()
        order.append(str(tier))

    threads = []
    for i, tier in enumerate((5, 0, 3)):
        threads.append(threading.Thread(target=one, args=(tier,)))
        threads[-1].start()
        until(lambda i=i: waiting(i + 1))
    running.close()
    for thread in threads:
        thread.join(20)
    return order


def test_the_hold_queue_uses_the_ordering(tmp_path: Path) -> None:
    engine = serving.emulator()
    policies = {"ordering": "priority", "ordering_at": "gateway", "window": 1}
    front = serving.gateway(
        serving.fleet_file(tmp_path, [engine.url], policies=policies, gateway={"max_held": 3}, pool={"replicas": 1})
    )
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        refused: list[tuple[int, str]] = []

        def first() -> serving.Reply:
            return chat(front, max_tokens=30_000, ignore_eos=True, stream=True)

        def waiting(num: int) -> bool:
            held = metric(front, "headway_requests_held") == num
            if held and num == 3 and not refused:
                reply = chat(front, max_tokens=1)
                refused.append((reply.status, reply.json()["error"]["code"]))
            return held and metric(engine, "vllm:num_requests_running") == 1

        assert _in_turn(front, first, waiting) == ["0", "3", "5"]
        assert refused == [(429, "queue_full")]


def test_tiers_are_sent_to_engines_with_a_priority_field(tmp_path: Path) -> None:
    engine = serving.emulator("--scheduling-policy", "priority", "--max-num-seqs", "1")
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies={"ordering": "priority"}))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        order = _in_turn(
            front,
            lambda: chat(front, max_tokens=30_000, ignore_eos=True, stream=True),
            lambda num: metric(engine, "vllm:num_requests_waiting") == num,
        )
        assert order == ["0", "3", "5"]


def test_flex_requests_wait_until_they_delay_nobody(tmp_path: Path) -> None:
    engine = serving.emulator()
    policies = {"admission": {"name": "by-deadline", "interval_s": 0.02, "share": 1e-6}}  # room beside nobody
    front = serving.gateway(
        serving.fleet_file(tmp_path, [engine.url], policies=policies, gateway={"max_held": 1}, pool={"replicas": 1})
    )
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        running = chat(front, max_tokens=30_000, ignore_eos=True, stream=True)
        until(lambda: metric(engine, "vllm:num_requests_running") == 1)
        answered: list[Any] = []
        waiting = threading.Thread(
            target=lambda: answered.append(chat(front, max_tokens=2, service_tier="flex").json())
        )
        waiting.start()
        until(lambda: metric(front, "headway_requests_held") == 1)
        assert "choices" in chat(front, max_tokens=2).json(), "others are not held"
        refused = chat(front, max_tokens=2, service_tier="flex")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "queue_full")
        assert not answered
        running.close()
        waiting.join(20)
        assert "choices" in answered[0]


class Recorder(ScriptedEngine):
    """An engine with a name of its own for the model."""

    async def get(self, exchange: Exchange) -> None:
        exchange.answer({"data": [{"id": "own-name"}]})

    async def complete(self, exchange: Exchange) -> None:
        exchange.answer({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with running(Recorder()) as made:
        yield made


def test_each_engine_gets_its_own_priority_sign_and_model_name(recorder: Recorder, tmp_path: Path) -> None:
    pool = {"gpu": "h100", "endpoints": [recorder.url]}
    fleet = [
        {**pool, "name": "v", "model": "qwen3-8b", "engine": "vllm-0.15"},
        {**pool, "name": "s", "model": "llama-3.1-8b", "engine": "sglang"},
    ]
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump({"fleet": fleet, "policies": {"ordering": "priority"}}))
    with serving.up(serving.gateway(path), 2) as front:
        for model in ("qwen3-8b", "llama-3.1-8b"):
            chat(front, model=model, priority=3, max_tokens=1).json()
        chat(front, service_tier="flex", max_tokens=1).json()
        chat(front, headers={"x-headway-tier": "2"}, max_tokens=1).json()
        chat(front, model="own-name", max_tokens=1).json()
        assert [body["priority"] for body in recorder.bodies[:4]] == [3, -3, 1, 2]
        assert {body["model"] for body in recorder.bodies} == {"own-name"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": {"ordering": "edf"}}, "only by fcfs or priority; with ordering_at gateway"),
        ({"policies": {"ordering": "round-robin"}}, "with ordering_at gateway"),
        ({"policies": {"ordering": "priority"}, "pool": {"api": "openai"}}, "no order but fcfs, not priority"),
        ({"policies": {"routing": "jsq-tokens-oracle"}}, "only a simulation knows"),
        ({"policies": {"migration": "pascal"}, "pool": {"api": "openai"}}, "nothing can move"),
        ({"policies": {"scaling": "freeness"}}, "where nothing can be started"),
        ({"policies": {"routing": ["random", "round-robin"]}}, "several of a kind"),
        ({"pool": {"endpoints": []}}, "fleet[0].endpoints: missing"),
        ({"pool": {"endpoints": ["localhost:80"]}}, "fleet[0].endpoints[0]: 'localhost:80'; expected http://host:port"),
        (
            {"pool": {"endpoints": ["http://a:1", "http://b:1", "http://a:1"]}},
            "fleet[0].endpoints[2]: 'http://a:1' is here a second time",
        ),
        ({"pool": {"replicas": 3}}, "3; expected 1, as many as endpoints"),
        ({"pool": {"endpoint": "http://a:1"}}, "unknown key 'endpoint'; did you mean 'endpoints'?"),
        ({"gateway": {"timeout": 1}}, "unknown key 'timeout'; did you mean 'timeout_s'?"),
    ],
)
def test_policies_that_engines_cannot_carry_out_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    from headway import serving as composition

    path = serving.fleet_file(tmp_path, ["http://127.0.0.1:1"], **changes)
    with pytest.raises(HeadwayError) as error:
        composition.load(path)
    assert words in str(error.value) and str(path) in str(error.value)


def test_one_file_is_simulated_and_served_and_its_records_run_again(tmp_path: Path) -> None:
    engine = serving.emulator("--reasoning-tokens", "5", "--speed", "4")
    path = serving.fleet_file(tmp_path, [engine.url])
    front = serving.gateway(path, "--records", str(tmp_path / "records"))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        for tier in (0, 1, 2):
            list(chat(front, max_tokens=10 + tier, priority=tier, stream=True).events())
        chat(front, max_tokens=4, headers={"x-headway-region": "eu"}).json()
        reply = chat(front, max_tokens=20_000, ignore_eos=True, stream=True)
        next(reply.events())
        reply.close()
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        assert "wrote 5 requests" in front.stop()
    ran, _ = records.load(tmp_path / "records")
    assert list(ran.workload["tier"]) == [0, 1, 2, 0, 0]
    assert [ran.regions[code] for code in ran.workload["region"]] == ["", "", "", "eu", ""]
    assert list(ran.workload["output_tokens"][:4]) == [10, 11, 12, 4]
    assert list(ran.workload["reasoning_tokens"][:3]) == [5, 5, 5]
    assert list(ran.requests["outcome"]) == [Outcome.FINISHED] * 4 + [Outcome.CANCELLED]
    waits = ran.requests["first_token_s"] - ran.workload["arrival_s"][ran.requests["request"]]
    assert list(np.isnan(waits)) == [False, False, False, True, False]  # the fourth was not streamed
    streamed = ~np.isnan(waits)
    assert (waits[streamed] > 0).all()
    assert (ran.requests["end_s"] >= ran.requests["first_token_s"])[streamed].all()
    data = yaml.safe_load(path.read_text())
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({**data, "workload": {"trace": str(tmp_path / "records/requests.parquet")}}))
    assert scenario.run(scenario.load(again)).summary.num_requests == 5


def test_a_migration_policy_moves_answers_after_their_reasoning(tmp_path: Path) -> None:
    """By a policy of the user's own, that moves everything; the gateway may stand still for a while."""
    (tmp_path / "restless.py").write_text(serving.RESTLESS_POLICY)
    engines = [serving.emulator("--reasoning-tokens", "30", "--speed", "2") for _ in range(2)]
    path = serving.fleet_file(tmp_path, [engine.url for engine in engines], policies={"migration": "restless:Restless"})
    front = serving.gateway(path, "--records", str(tmp_path / "records"))
    with serving.closing(*engines, front):
        serving.all_up(front, 2)
        events = list(chat(front, max_tokens=800, ignore_eos=True, stream=True).events())
        whole = chat(engines[0], max_tokens=800, ignore_eos=True).json()["choices"][0]["message"]
        assert serving.answer_text(events, "reasoning").split() == whole["reasoning"].split()
        assert serving.answer_text(events).split() == whole["content"].split()
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        front.stop()
    ran, _ = records.load(tmp_path / "records")
    assert list(ran.requests["moves"]) == [1] and list(ran.requests["attempts"]) == [1]
    assert list(ran.requests["generated_tokens"]) == [800]


def test_an_admission_policy_releases_requests(tmp_path: Path) -> None:
    """Batch work waits while the engine is held by nobody but the policy."""
    (tmp_path / "patient.py").write_text(PATIENT)
    engine = serving.emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies={"admission": "patient:Patient"}))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        order: list[str] = []

        def one(tier: int) -> None:
            chat(front, max_tokens=1, priority=tier).json()
            order.append(str(tier))

        threads = [threading.Thread(target=one, args=(tier,)) for tier in (2, 2)]
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert not order, "batch work waits"
        one(0)
        for thread in threads:
            thread.join(20)
        assert sorted(order) == ["0", "2", "2"]


def test_a_failing_policy_is_an_error_without_leftovers(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    engine = serving.emulator()
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies={"routing": "broken:Broken"}))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        for _ in range(2):
            reply = chat(front, max_tokens=1)
            assert reply.status == 500 and reply.json()["error"]["code"] == "policy_error"
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        assert metric(front, "headway_requests_total") == 2
        assert "router Broken chose replica 7" in front.stop()


BROKEN = """
from headway.core.decision import Placement


class Broken:
    def route(self, request, view):
        return Placement(7)
"""

PATIENT = '''
from headway.core.decision import Release


class Patient:
    """Keeps tier 2 until two are there and somebody else has been served."""

    interval_s = 0.05
    served = False

    def holds(self, request):
        self.served |= request.tier == 0
        return request.tier == 2

    def release(self, view):
        return [Release(request.id) for request in view.held] if self.served and len(view.held) == 2 else []
'''
