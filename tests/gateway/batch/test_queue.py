"""The queue of batches in the database: creation, pages, the first answer to a line, and the files of the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("aiosqlite")

from headway.gateway.batch import queue, service
from headway.gateway.batch.files import find_file, list_files, read_lines
from headway.gateway.batch.objects import BatchError, BatchObject, Page
from headway.gateway.batch.queue import Line, LineResult
from headway.gateway.batch.store import BatchStore
from headway.gateway.settings import Batches, Settings

PATH = "/v1/chat/completions"


def _run(folder: Path, scenario: Callable[[BatchStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = BatchStore(str(folder / "batches.sqlite"))
        await store.open()
        try:
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(run())


async def _create(store: BatchStore, num_lines: int) -> BatchObject:
    batch = await queue.create_batch(store, "me", "file-1", PATH, "24h", 86_400, {"a": "b"})
    await queue.add_lines(store, [Line(batch.id, i, f"line {i}", b"{}") for i in range(1, num_lines + 1)])
    await queue.start_batch(store, batch.id, num_lines)
    return batch


def test_a_batch_belongs_to_its_owner(tmp_path: Path) -> None:
    async def scenario(store: BatchStore) -> None:
        batch = await queue.create_batch(store, "me", "file-1", PATH, "24h", 86_400, {"a": "b"})
        assert batch.status == "validating" and batch.metadata == {"a": "b"}
        assert batch.expires_at is not None and 0 <= batch.expires_at - batch.created_at - 86_400 <= 1
        assert await queue.find_batch(store, "me", batch.id) == batch
        assert await queue.find_batch(store, "you", batch.id) is None
        await queue.cancel_batch(store, "you", batch.id)
        assert await queue.find_batch(store, "me", batch.id) == batch
        await queue.cancel_batch(store, "me", batch.id)
        (active,) = await queue.active_batches(store)
        assert active.status == "cancelling"

    _run(tmp_path, scenario)


def test_lists_come_page_by_page_with_the_newest_first(tmp_path: Path) -> None:
    async def scenario(store: BatchStore) -> None:
        ids = [(await _create(store, 1)).id for _ in range(5)][::-1]
        first = await queue.list_batches(store, "me", Page(None, 3))
        assert [each.id for each in first.data] == ids[:3] and first.has_more
        assert (first.first_id, first.last_id) == (ids[0], ids[2])
        rest = await queue.list_batches(store, "me", Page(first.last_id, 3))
        assert [each.id for each in rest.data] == ids[3:] and not rest.has_more
        empty = await queue.list_batches(store, "you", Page(None, 3))
        assert (empty.data, empty.first_id, empty.last_id, empty.has_more) == ([], None, None, False)

    _run(tmp_path, scenario)


def test_the_first_result_of_a_line_counts_and_the_end_writes_both_files(tmp_path: Path) -> None:
    async def scenario(store: BatchStore) -> None:
        batch = await _create(store, 4)
        assert [line.line for line in await queue.open_lines(store, batch.id, 1, 2)] == [2, 3]
        await queue.write_results(
            store, [LineResult(batch.id, 1, True, b"good"), LineResult(batch.id, 2, False, b"bad")]
        )
        await queue.write_results(store, [LineResult(batch.id, 1, False, b"late")])
        (active,) = await queue.active_batches(store)
        assert (active.num_total, active.num_ended) == (4, 2)
        await queue.finish_batch(store, active, "cancelled")
        ended = await queue.find_batch(store, "me", batch.id)
        assert ended is not None and ended.status == "cancelled" and ended.output_file_id and ended.error_file_id
        counts = ended.request_counts
        assert (counts.total, counts.completed, counts.failed) == (4, 1, 3)
        files = {}
        for id in (ended.output_file_id, ended.error_file_id):
            file = await find_file(store, "me", id)
            assert file is not None
            files[id] = [line async for line in read_lines(store, file, 1 << 20)]
        assert files[ended.output_file_id] == [b"good"]
        first, *unanswered = files[ended.error_file_id]
        assert first == b"bad" and [json.loads(line)["custom_id"] for line in unanswered] == ["line 3", "line 4"]
        assert len((await list_files(store, "me", Page(None, 10), "batch_output")).data) == 2
        assert not await queue.active_batches(store) and not await queue.open_lines(store, batch.id, 0, 10)

    _run(tmp_path, scenario)


def test_an_invalid_batch_keeps_its_errors(tmp_path: Path) -> None:
    async def scenario(store: BatchStore) -> None:
        batch = await queue.create_batch(store, "me", "file-1", PATH, "24h", 86_400, None)
        errors = [BatchError("empty_file", "the file has no requests", None, None)]
        await queue.fail_batch(store, batch.id, errors)
        failed = await queue.find_batch(store, "me", batch.id)
        assert failed is not None and failed.status == "failed" and failed.errors is not None
        assert failed.errors.data == errors and failed.failed_at is not None

    _run(tmp_path, scenario)


def test_entries_have_the_answer_as_json_or_as_text() -> None:
    good = json.loads(queue.encode_entry("a", 200, "id-1", b'{"x": 1}'))
    assert good["id"].startswith("batch_req_") and (good["custom_id"], good["error"]) == ("a", None)
    assert good["response"] == {"status_code": 200, "request_id": "id-1", "body": {"x": 1}}
    assert json.loads(queue.encode_entry("a", 502, "id-1", b"no\xff"))["response"]["body"] == "no\ufffd"


def test_an_error_without_words_does_not_end_the_work_on_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a server takes connections and does not answer."""
    monkeypatch.setattr(service, "_IDLE_S", 0.0)

    async def story() -> None:
        settings = Settings(batches=Batches(store=str(tmp_path / "batches.sqlite")))
        batches = service.BatchService(settings, None, None, None)  # type: ignore[arg-type]  # there are no batches
        opened, is_again = batches.store.open, asyncio.Event()
        errors = [TimeoutError(), TimeoutError()]

        async def open() -> None:
            if errors:
                raise errors.pop()
            await opened()
            is_again.set()

        monkeypatch.setattr(batches.store, "open", open)
        batches.start()
        while not is_again.is_set():
            assert batches._task is not None and not batches._task.done()
            await asyncio.sleep(0)
        await batches.stop()

    asyncio.run(story())


@pytest.mark.parametrize("is_broken", [False, True])
@pytest.mark.parametrize("how", ["answered", "cancelled", "broken"])
def test_a_line_is_settled_however_its_relay_ends(tmp_path: Path, how: str, is_broken: bool) -> None:
    """Otherwise its reservation in the key's budget would stay, and its tokens would be free. A line that is cancelled
    ends, also if its settlement fails."""

    class _Relay:
        in_flight = object()

        async def run(self) -> None:
            if how == "broken":
                raise ValueError("a defect")
            await asyncio.sleep(3600.0 if how == "cancelled" else 0.0)

    async def story() -> None:
        settled: list[object] = []

        def settle(in_flight: object) -> None:
            settled.append(in_flight)
            if is_broken:
                raise ValueError("a defect")

        settings = Settings(batches=Batches(store=str(tmp_path / "batches.sqlite")))
        caller = SimpleNamespace(tier=0)
        batches = service.BatchService(settings, lambda *each: _Relay(), settle, lambda owner: caller)  # type: ignore[arg-type,return-value]
        body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        batch = queue.ActiveBatch("b", "me", "in_progress", PATH, "file", 1 << 33, 1, 0)
        sending = asyncio.create_task(batches._send(batch, Line("b", 1, "one", body), "id"))
        await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.wait({sending})
        assert settled == [_Relay.in_flight]
        assert sending.cancelled() == (how == "cancelled")

    asyncio.run(story())
