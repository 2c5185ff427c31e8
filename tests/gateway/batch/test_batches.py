"""Batches through OpenAI's own client: upload, progress, cancellation, retries, and recovery after a kill."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

import batching
import serving
from batching import answers, begin, client, ended, jsonl, line, num_completed
from serving import MODEL, metric, send, until

pytest.importorskip("httptools")
openai = pytest.importorskip("openai")
_closed = pytest.fixture(autouse=True)(batching.closed)

BRISK = {"name": "queue-manager", "interval_s": 0.02}


@pytest.fixture(scope="module")
def front(engine: serving.Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    keys = [sha256(name).hexdigest() for name in (b"ann", b"bob")]
    path = serving.fleet_file(
        tmp_path_factory.mktemp("fleet"),
        [engine.url],
        policies={"admission": BRISK},
        gateway={"api_keys": keys, "batches": {"max_file_bytes": 100_000, "max_lines": 50}},
    )
    with serving.up(serving.gateway(path), 1) as made:
        yield made


def test_each_line_is_answered_with_its_custom_id(front: serving.Process) -> None:
    ann = client(front, "ann")
    names = [f"line {i}" for i in range(20)]
    batch = begin(ann, jsonl([line(name) for name in names]), metadata={"of": "ann"})
    assert batch.object == "batch" and batch.status == "validating" and batch.metadata == {"of": "ann"}
    assert batch.expires_at - batch.created_at == 86_400
    batch = ended(ann, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 20, 20, 0)
    assert batch.error_file_id is None and batch.completed_at >= batch.in_progress_at >= batch.created_at
    output = answers(ann, batch.output_file_id)
    assert [each["custom_id"] for each in output] == names
    for each in output:
        assert each["error"] is None and each["response"]["status_code"] == 200
        assert each["response"]["body"]["usage"]["completion_tokens"] == 3
    assert len({each["id"] for each in output}) == 20
    straight = ann.chat.completions.create(**line("line 7")["body"]).choices[0].message.content
    assert output[7]["response"]["body"]["choices"][0]["message"]["content"] == straight


def test_a_refused_request_is_in_the_error_file(front: serving.Process) -> None:
    ann = client(front, "ann")
    lines = [line("good"), line("much", n=-1), line("who", model="nobody"), line("streamed", stream=True), line("fine")]
    batch = ended(ann, begin(ann, jsonl(lines)))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 3)
    assert [each["custom_id"] for each in answers(ann, batch.output_file_id)] == ["good", "fine"]
    failed = {each["custom_id"]: each["response"] for each in answers(ann, batch.error_file_id)}
    assert {name: each["status_code"] for name, each in failed.items()} == {"much": 400, "who": 404, "streamed": 400}
    assert "nobody" in failed["who"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl([line("a")]) + b"{oops\n", "invalid_json_line", 2),
        (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
        (jsonl([{**line("a"), "url": "/v1/completions"}]), "mismatched_url", 1),
        (jsonl([{**line("a"), "method": "GET"}]), "invalid_method", 1),
        (jsonl([{**line("a"), "body": [1]}]), "invalid_body", 1),
        (jsonl([line("a"), line("b\0")]), "invalid_custom_id", 2),
        (jsonl([line("a" * 513)]), "invalid_custom_id", 1),
        (b"\xff\xfe{}\n", "invalid_json_line", 1),
        (b"[" * 50_000 + b"\n", "invalid_json_line", 1),
        (jsonl([{"custom_id": "a", "url": "/v1/chat/completions"}]), "invalid_json_line", 1),
        (jsonl([line(str(i)) for i in range(51)]), "too_many_lines", 51),
    ],
)
def test_an_invalid_file_fails_with_the_number_of_each_line(
    front: serving.Process, content: bytes, code: str, at: int | None
) -> None:
    ann = client(front, "ann")
    batch = ended(ann, begin(ann, content))
    assert batch.status == "failed" and batch.request_counts.total == 0 and batch.output_file_id is None
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, at)]


def test_files_are_kept_as_they_came_and_deleted_when_asked(front: serving.Process) -> None:
    bob = client(front, "bob")
    content = b"\x00\xff \r\n" * 9000
    file = bob.files.create(file=("any.bin", content), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.status) == (len(content), "any.bin", "batch", "processed")
    assert bob.files.content(file.id).content == content and bob.files.retrieve(file.id) == file
    assert bob.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        bob.files.retrieve(file.id)


def test_lists_come_in_pages_newest_first(front: serving.Process) -> None:
    bob = client(front, "bob")
    made = [bob.files.create(file=(f"{i}", b"x"), purpose="batch").id for i in range(5)]
    assert [file.id for file in bob.files.list(limit=2)][:5] == made[::-1]  # the client asks for page after page
    assert not bob.files.list(purpose="batch_output").data
    assert bob.files.list(limit=2, purpose="batch").has_more and len(bob.files.list(limit=2).data) == 2
    batches = [begin(bob, jsonl([line("a")])).id for _ in range(3)]
    assert [batch.id for batch in bob.batches.list(limit=2)][:3] == batches[::-1]


def test_a_key_sees_nothing_of_anothers(front: serving.Process) -> None:
    ann, bob = client(front, "ann"), client(front, "bob")
    batch = ended(ann, begin(ann, jsonl([line("a")])))
    for asked in (
        lambda: bob.files.retrieve(batch.input_file_id),
        lambda: bob.files.content(batch.output_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            asked()
    assert batch.id not in [each.id for each in bob.batches.list()]
    assert batch.output_file_id not in [each.id for each in bob.files.list()]
    with pytest.raises(openai.AuthenticationError):
        client(front, "eve").files.list()


def test_invalid_requests_are_refused(front: serving.Process) -> None:
    ann = client(front, "ann")
    with pytest.raises(openai.APIStatusError, match="longer than 100,000 bytes") as error:
        ann.files.create(file=("big", b"x" * 100_001), purpose="batch")
    assert error.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="expected 'batch'"):
        ann.files.create(file=("a", b"x"), purpose="fine-tune")
    file = ann.files.create(file=("a", b"x"), purpose="batch").id
    with pytest.raises(openai.BadRequestError, match="expected one of /v1/chat/completions"):
        ann.batches.create(input_file_id=file, endpoint="/v1/moderations", completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="expected '24h'"):
        ann.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="soon")
    bearer = {"Authorization": "Bearer ann"}
    for path, body, status in (
        ("/v1/files", b"no form", 400),
        ("/v1/batches", b"{", 400),
        ("/v1/batches", b"[]", 400),
        ("/v1/batches", b" " * 70_000, 413),
        ("/v1/files?limit=x", None, 400),
        ("/v1/batches/batch_x", None, 404),
        ("/v1/files/%00", None, 404),
        ("/v1/batches/%00/cancel", b"", 404),
        ("/v1/files?after=%00", None, 400),
        ("/v1/files?limit=0", None, 400),
        ("/v1/batches?limit=99999999", None, 400),
    ):
        reply = send(front, path, body, bearer)
        assert reply.status == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\ncut o'
    broken = send(front, "/v1/files", form, {**bearer, "Content-Type": "multipart/form-data; boundary=b"})
    assert broken.status == 400 and "form" in broken.json()["error"]["message"]


def test_without_a_store_there_are_no_batches(engine: serving.Process, tmp_path: Path) -> None:
    front = serving.gateway(serving.fleet_file(tmp_path, [engine.url]))
    with serving.closing(front):
        reply = send(front, "/v1/batches")
        assert reply.status == 404 and "gateway.batches" in reply.json()["error"]["message"]


def test_a_batch_survives_the_death_of_its_gateway(engine: serving.Process, tmp_path: Path) -> None:
    """Of two gateways in a row; each line is answered once."""
    path = batching.slow(engine, tmp_path)
    names = [f"n{i}" for i in range(60)]
    front = serving.gateway(path)
    batch = begin(client(front), jsonl([line(name, max_tokens=60) for name in names]))
    for least in (5, 25):
        with serving.closing(front):
            until(lambda front=front, least=least: num_completed(front, batch.id) >= least)
        front = serving.gateway(path)
    with serving.closing(front):
        who = client(front)
        batch = ended(who, who.batches.retrieve(batch.id))
        assert batch.status == "completed" and batch.request_counts.completed == 60
        output = answers(who, batch.output_file_id)
        assert [each["custom_id"] for each in output] == names
        assert all(each["response"]["body"]["usage"]["completion_tokens"] == 60 for each in output)
        assert metric(front, "headway_batch_requests_open") == 0


def test_a_cancelled_batch_keeps_its_answers(engine: serving.Process, tmp_path: Path) -> None:
    front = serving.gateway(batching.slow(engine, tmp_path))
    with serving.closing(front):
        who = client(front)
        batch = begin(who, jsonl([line(f"{i}", max_tokens=200) for i in range(40)]))
        until(lambda: num_completed(front, batch.id) >= 3)
        assert who.batches.cancel(batch.id).status == "cancelling"
        batch = ended(who, batch)
        done, left = answers(who, batch.output_file_id), answers(who, batch.error_file_id)
        assert batch.status == "cancelled" and len(done) >= 3 and len(left) >= 10
        assert sorted(int(each["custom_id"]) for each in done + left) == list(range(40))
        assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(done), len(left))
        until(lambda: metric(front, "headway_requests_in_flight") == 0)
        assert who.batches.cancel(batch.id).status == "cancelled"


def test_lines_without_an_answer_in_time_expire(engine: serving.Process, tmp_path: Path) -> None:
    path = batching.slow(engine, tmp_path)
    front = serving.gateway(path)
    with serving.closing(front):
        who = client(front)
        batch = begin(who, jsonl([line(f"{i}", max_tokens=2000) for i in range(40)]), completion_window="1m")
        until(lambda: who.batches.retrieve(batch.id).status == "in_progress")
        with sqlite3.connect(tmp_path / "batches.sqlite", timeout=10) as database:
            database.execute("UPDATE headway_batches SET expires_at = ?", (int(time.time()),))
        database.close()
        batch = ended(who, batch)
        assert batch.status == "expired" and batch.request_counts.failed >= 30
        assert {each["error"]["code"] for each in answers(who, batch.error_file_id)} == {"batch_expired"}


def test_a_line_that_an_engine_fails_is_retried(tmp_path: Path) -> None:
    """Also while no replica is up."""
    flaky = serving.emulator()
    front = serving.gateway(batching.slow(flaky, tmp_path))
    with serving.closing(flaky, front):
        serving.all_up(front, 1)
        send(flaky, "/emulator/failures", [500, 429], method="PUT").json()
        who = client(front)
        batch = ended(who, begin(who, jsonl([line("a"), line("b")])))
        assert batch.status == "completed" and batch.request_counts.completed == 2
        flaky.kill()
        until(lambda: send(front, "/health").json()["up"] == 0)
        batch = begin(who, jsonl([line("c")]))
        until(lambda: metric(front, "headway_batch_requests_open") == 1)
        again = serving.emulator(port=flaky.port)
        with serving.closing(again):
            assert ended(who, batch).request_counts.completed == 1


def test_of_two_gateways_one_runs_batches_and_the_other_takes_over(engine: serving.Process, tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "shared.sqlite")}
    first = serving.gateway(batching.slow(engine, tmp_path / "a", **store))
    with serving.closing(first):
        batch = begin(client(first), jsonl([line(f"{i}", max_tokens=100) for i in range(30)]))
        until(lambda: num_completed(first, batch.id) >= 1)
        second = serving.gateway(batching.slow(engine, tmp_path / "b", **store))
        with serving.closing(second):
            until(lambda: num_completed(second, batch.id) >= 5)
            assert metric(second, "headway_batch_requests_open") == 0
            first.kill()
            who = client(second)
            batch = ended(who, batch)
            assert len(answers(who, batch.output_file_id)) == 30


def test_a_batch_has_the_tier_of_its_key_and_may_use_a_cascade(engine: serving.Process, tmp_path: Path) -> None:
    key = {"sha256": sha256(b"ann").hexdigest(), "tier": 5}
    path = serving.fleet_file(
        tmp_path,
        [engine.url],
        policies={"admission": BRISK},
        gateway={"api_keys": [key], "batches": {}},
        cascade={"name": "best", "models": [MODEL, MODEL], "policy": "thresholds", "judge": {"by": "confidence"}},
    )
    front = serving.gateway(path)
    with serving.closing(front):
        who = client(front, "ann")
        batch = ended(who, begin(who, jsonl([line("a", model="best"), line("b", priority=0)])))
        assert batch.request_counts.completed == 2
        page = send(front, "/metrics").text()
        assert f'headway_requests_total{{model="{MODEL}",pool="pool",tier="5",outcome="finished"}} 2' in page
        assert f'headway_judgements_total{{model="{MODEL}",outcome="accepted"}} 1' in page


def test_a_long_batch_does_not_delay_a_short_one(engine: serving.Process, tmp_path: Path) -> None:
    front = serving.gateway(batching.slow(engine, tmp_path))
    with serving.closing(front):
        who = client(front)
        long = begin(who, jsonl([line(f"{i}", max_tokens=20) for i in range(200)]))
        until(lambda: num_completed(front, long.id) >= 1)
        short = ended(who, begin(who, jsonl([line(f"{i}") for i in range(3)])))
        assert short.status == "completed" and num_completed(front, long.id) < 100


def test_batches_wait_while_engines_are_busy(engine: serving.Process, tmp_path: Path) -> None:
    """The default queue manager sees full endpoints."""
    admission = {"name": "queue-manager", "interval_s": 0.02, "threshold": 0.0, "low_threshold": 0.0}
    path = serving.fleet_file(tmp_path, [engine.url], policies={"admission": admission}, gateway={"batches": {}})
    with serving.up(serving.gateway(path), 1) as front:
        who = client(front)
        batch = begin(who, jsonl([line("a")]))
        until(lambda: metric(front, "headway_batch_requests_open") == 1)
        assert serving.chat(front, max_tokens=2).json()["usage"]
        assert num_completed(front, batch.id) == metric(front, "headway_requests_in_flight") == 0
        in_time = begin(who, jsonl([line("b")]), completion_window="1h")  # within the margin: it is released at once
        assert ended(who, in_time).status == "completed"
        assert num_completed(front, batch.id) == 0
