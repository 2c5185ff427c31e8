"""Keys as tenants: fair sharing by default, tenants in metrics and records, batches in limits and quotas."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import batching
import serving
from batching import begin, client, ended, jsonl, line
from headway import records
from headway import serving as composition
from headway.core.errors import HeadwayError
from headway.gateway.fleet.specs import ServingPlan
from keys import bearer, digest
from serving import chat, metric, until

pytest.importorskip("httptools")
_closed = pytest.fixture(autouse=True)(batching.closed)
KEYS = [{"sha256": digest("a"), "name": "ann", "weight": 3}, {"sha256": digest("b"), "name": "bob"}, digest("c")]


def planned(folder: Path, keys: list[Any] = KEYS, **policies: Any) -> ServingPlan:
    changes = {"policies": policies} if policies else {}
    path = serving.fleet_file(folder, ["http://127.0.0.1:1"], gateway={"api_keys": keys}, **changes)
    return composition.load(path)[1]


def test_where_keys_are_tenants_share_fairly_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert (str(plan.policies.ordering), plan.policies.ordering_at) == ("fair(weights={'ann': 3.0})", "gateway")
    assert plan.policies.window == 256 and plan.policies.prompt_window and not plan.sends_priority
    assert planned(tmp_path, window=8).policies.window == 8
    assert str(
        planned(tmp_path, ordering={"name": "fair", "headroom": 0}, ordering_at="gateway").policies.ordering
    ) == ("fair(headroom=0, weights={'ann': 3.0})")
    for policies in ({"ordering": "fcfs"}, {"ordering": "priority"}, {"ordering_at": "replica"}):
        assert str(planned(tmp_path, **policies).policies.ordering) != "fair"
    assert str(planned(tmp_path, keys=[]).policies.ordering) == "fcfs"


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    same = [{"sha256": digest(key), "name": "ann", "weight": 2} for key in "ab"]
    assert str(planned(tmp_path, same).policies.ordering) == "fair(weights={'ann': 2.0})"
    with pytest.raises(HeadwayError, match=r"'ann' has keys of weights 2 and 1; expected one weight"):
        planned(tmp_path, [same[0], {**same[1], "weight": 1}])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_flood_of_one_key_does_not_hold_up_another(tmp_path: Path, workers: int) -> None:
    engine = serving.emulator("--speed", "4")
    path = serving.fleet_file(tmp_path, [engine.url], policies={"window": 1}, gateway={"api_keys": KEYS, "max_held": 4})
    front = serving.gateway(path, "--records", str(tmp_path / "records"), "--workers", str(workers))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        running = chat(front, max_tokens=30_000, ignore_eos=True, stream=True, headers=bearer("b"))
        statuses: list[tuple[str, int]] = []

        def send(key: str) -> None:
            reply = chat(front, max_tokens=20, headers=bearer(key))
            statuses.append((key, reply.status))
            reply.json()

        threads = []
        for num, key in enumerate(["b"] * 4 + ["a", "c"], 1):
            threads.append(threading.Thread(target=send, args=(key,)))
            threads[-1].start()
            until(lambda num=num: metric(front, "headway_requests_held") == num)
        assert metric(front, 'headway_tenant_requests_held{tenant="bob"}') == 4
        send("b")  # the queue is full, and its line is the longest
        assert statuses == [("b", 429)]
        running.close()
        for thread in threads:
            thread.join(20)
        assert sorted(statuses[1:]) == [("a", 200), *4 * [("b", 200)], ("c", 200)]
        assert metric(front, 'headway_tenant_requests_total{model="qwen3-8b",tenant="bob"}') == 5
        front.stop()
    ran, _ = records.load(tmp_path / "records")
    names = [ran.tenants[code] for code in ran.workload["tenant"]]
    digested = digest("c")[:12]
    assert names == ["bob"] * 5 + ["ann", digested]
    placed_s = dict(zip(ran.requests["request"], ran.requests["placed_s"], strict=True))
    served = [names[i] for i in sorted(range(1, 7), key=placed_s.__getitem__)]
    assert set(served[:2]) == {"ann", digested} and served[2:] == ["bob"] * 4


def test_a_request_that_is_held_for_too_long_gets_a_503_with_retry_after(tmp_path: Path) -> None:
    engine = serving.emulator()
    policies = {"window": 1, "ordering_at": "gateway", "max_hold_s": 0.3}
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies=policies))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        running = chat(front, max_tokens=30_000, ignore_eos=True, stream=True)
        until(lambda: metric(front, "headway_requests_in_flight") == 1)
        reply = chat(front, max_tokens=5)
        assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == "no_capacity"
        running.close()


def test_lines_of_a_batch_count_against_the_limits_of_their_key(tmp_path: Path) -> None:
    engine = serving.emulator()
    keys = [{"sha256": digest("a"), "requests_per_minute": 5}]
    gateway = {"api_keys": keys, "batches": {}}
    policies = {"admission": {"name": "queue-manager", "interval_s": 0.02}}
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies=policies, gateway=gateway))
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        ann = client(front, "a")
        batch = begin(ann, jsonl([line(f"line {i}") for i in range(8)]))
        until(lambda: ann.batches.retrieve(batch.id).request_counts.completed == 5)
        assert chat(front, max_tokens=1, headers=bearer("a")).json()["error"]["code"] == "rate_limit_exceeded"
        batch = ann.batches.retrieve(batch.id)
        assert (batch.status, batch.request_counts.failed) == ("in_progress", 0)  # the rest waits


def test_a_key_stores_no_more_than_its_quota(tmp_path: Path) -> None:
    engine = serving.emulator()
    content = jsonl([line(f"line {i}") for i in range(4)])
    gateway = {"api_keys": [digest("a"), digest("b")], "batches": {"max_stored_bytes": int(2.5 * len(content))}}
    policies = {"admission": {"name": "queue-manager", "interval_s": 0.02}}
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url], policies=policies, gateway=gateway))
    openai = pytest.importorskip("openai")
    with serving.closing(engine, front):
        serving.all_up(front, 1)
        ann, bob = client(front, "a"), client(front, "b")
        batch = begin(ann, content)  # its lines are a second copy until it has ended
        with pytest.raises(openai.RateLimitError) as error:
            ann.files.create(file=("more.jsonl", content), purpose="batch")
        assert error.value.code == "insufficient_quota"
        bob.files.create(file=("more.jsonl", content), purpose="batch")
        batch = ended(ann, batch)
        assert batch.request_counts.completed == 4  # answers are stored in any case
        with pytest.raises(openai.RateLimitError):
            ann.batches.create(input_file_id=batch.input_file_id, endpoint=batch.endpoint, completion_window="24h")
        ann.files.delete(batch.output_file_id)
        ann.files.create(file=("more.jsonl", content), purpose="batch")
