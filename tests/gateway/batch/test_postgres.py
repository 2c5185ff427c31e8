"""Batches in a real PostgreSQL: shared by gateways that die, and a server that restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import batching
import postgres
import serving
from batching import answers, begin, client, ended, jsonl, line, num_completed
from serving import metric, send, until

pytest.importorskip("httptools")
pytest.importorskip("asyncpg")
pytestmark = pytest.mark.skipif(bool(postgres.missing()), reason=postgres.missing())
_closed = pytest.fixture(autouse=True)(batching.closed)


@pytest.fixture(scope="module")
def database() -> Iterator[postgres.Server]:
    with postgres.server() as made:
        yield made


def _has_open(gateway: serving.Process) -> bool:
    """Whether the gateway works on a batch: now and then all of its requests have ended."""
    return metric(gateway, "headway_batch_requests_open") > 0


def test_gateways_share_a_database_and_take_over_from_one_that_is_killed(
    engine: serving.Process, database: postgres.Server, tmp_path: Path
) -> None:
    url = database.create("shared")
    first = serving.gateway(batching.slow(engine, tmp_path / "a", store=url))
    second = serving.gateway(batching.slow(engine, tmp_path / "b", store=url))
    with serving.closing(first, second):
        serving.all_up(first, 1)
        serving.all_up(second, 1)
        who = client(second)
        names = [f"n{i}" for i in range(40)]
        batch = begin(who, jsonl([line(name, max_tokens=60) for name in names]))
        until(lambda: num_completed(second, batch.id) >= 5)
        at_work: list[serving.Process] = []
        until(lambda: at_work.extend(each for each in (first, second) if _has_open(each)) or at_work)
        assert len(at_work) == 1
        (worker,) = at_work
        other = second if worker is first else first
        worker.kill()
        who = client(other)
        batch = ended(who, who.batches.retrieve(batch.id))
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        assert [each["custom_id"] for each in answers(who, batch.output_file_id)] == names
        content = who.files.content(batch.input_file_id).content
        assert content.count(b"\n") == 40
        assert who.files.list(limit=1).has_more and len(who.batches.list().data) == 1


def test_a_database_that_goes_away_and_comes_back_loses_nothing(
    engine: serving.Process, database: postgres.Server, tmp_path: Path
) -> None:
    front = serving.gateway(batching.slow(engine, tmp_path, store=database.url))
    with serving.closing(front):
        who = client(front)
        batch = begin(who, jsonl([line(f"{i}", max_tokens=60) for i in range(30)]))
        until(lambda: num_completed(front, batch.id) >= 3)
        database.stop()
        reply = send(front, "/v1/batches")
        assert reply.status == 503 and reply.json()["error"]["code"] == "unavailable"
        assert serving.chat(front, max_tokens=2).json()["usage"]["completion_tokens"] == 2
        database.start()
        until(lambda: send(front, "/v1/batches").json().get("object") == "list")
        batch = ended(who, who.batches.retrieve(batch.id))
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)
        assert sorted(int(each["custom_id"]) for each in answers(who, batch.output_file_id)) == list(range(30))


def test_an_address_may_set_sslmode() -> None:
    from headway.gateway.database import postgres_url

    url = postgres_url("postgresql://me@db.example/work?sslmode=verify-full")
    assert url.query == {"ssl": "verify-full"} and url.drivername == "postgresql+asyncpg"


def test_a_gateway_may_start_before_its_database(
    engine: serving.Process, database: postgres.Server, tmp_path: Path
) -> None:
    database.stop()
    with serving.up(serving.gateway(batching.slow(engine, tmp_path, store=database.url)), 1) as front:
        reply = send(front, "/v1/files")
        assert reply.status == 503 and reply.headers["retry-after"] == "1"
        reply.close()
        database.start()
        until(lambda: send(front, "/v1/files").json().get("object") == "list")
        who = client(front)
        assert ended(who, begin(who, jsonl([line("a")]))).status == "completed"
        assert "wait for their database" in front.stop()
