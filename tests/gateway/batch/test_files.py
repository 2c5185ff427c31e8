"""Files that are deleted during a read: clients and batches get all of a file, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postgres
import serving
from batching import jsonl, line
from serving import send, until

pytest.importorskip("httptools")
pytest.importorskip("sqlalchemy")
from headway.gateway.batch import files, queue, validate
from headway.gateway.batch.files import PART_BYTES, DeletedError, FileWriter
from headway.gateway.batch.objects import FileObject
from headway.gateway.batch.store import BatchStore

NUM_BYTES = 40 << 20
"""More than sockets take without being read."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A database of the gateway, and one whose batches no gateway validates beside the test."""
    if request.param == "sqlite":
        folder = tmp_path_factory.mktemp("store")
        yield str(folder / "batches.sqlite"), str(folder / "unserved.sqlite")
        return
    pytest.importorskip("asyncpg")
    if why := postgres.missing():
        pytest.skip(why)
    with postgres.server() as database:
        yield database.url, database.create("unserved")


@pytest.fixture(scope="module")
def where(stores: tuple[str, str]) -> str:
    """The database without a gateway."""
    return stores[1]


@pytest.fixture(scope="module")
def front(stores: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[serving.Process]:
    path = serving.fleet_file(
        tmp_path_factory.mktemp("fleet"), ["http://127.0.0.1:1"], gateway={"batches": {"store": stores[0]}}
    )
    with contextlib.closing(serving.gateway(path)) as made:
        until(lambda: send(made, "/v1/files").json().get("object") == "list")
        yield made


def _uploaded(front: serving.Process, content: bytes) -> str:
    form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + content + b"\r\n--x--\r\n"
    reply = send(front, "/v1/files", form, {"content-type": "multipart/form-data; boundary=x"}).json()
    assert reply["bytes"] == len(content)
    return f"/v1/files/{reply['id']}"


def test_a_download_is_complete_though_its_file_is_deleted_meanwhile(front: serving.Process) -> None:
    file = _uploaded(front, b"0123456789abcdef" * (NUM_BYTES // 16))
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=serving.PATIENCE_S)
    connection.request("GET", f"{file}/content")
    response = connection.getresponse()
    begun = response.read(1 << 16)
    assert send(front, file, method="DELETE").json()["deleted"]
    again = send(front, f"{file}/content")
    assert again.status == 404 and again.json()["error"]["code"] == "not_found"
    assert begun + response.read() == b"0123456789abcdef" * (NUM_BYTES // 16)
    connection.close()


async def _write_file(store: BatchStore, content: bytes) -> FileObject:
    await store.open()
    async with store.begin() as connection:
        writer = FileWriter(connection, "me", "f", "batch")
        await writer.write(content)
        return await writer.close()


def test_reading_a_deleted_part_raises(where: str) -> None:
    async def scenario() -> None:
        store = BatchStore(where)
        file = await _write_file(store, b"x" * (3 * PART_BYTES + 1))
        assert sum([len(part) async for part in files.read_parts(store, file)]) == file.bytes
        parts = files.read_parts(store, file)
        assert len(await anext(parts)) == PART_BYTES
        assert await files.delete_file(store, "me", file.id)
        with pytest.raises(DeletedError):
            await anext(parts)
        with pytest.raises(DeletedError):
            await files.copy_file(store, file)
        await store.close()

    asyncio.run(scenario())


def test_a_batch_whose_file_is_deleted_during_validation_fails(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = BatchStore(where)
        content = jsonl([line(f"{i}", user="x" * 2000) for i in range(2000)])
        file = await _write_file(store, content)
        assert file.bytes > 2 * PART_BYTES
        made = await queue.create_batch(store, "me", file.id, "/v1/chat/completions", "24h", 86_400, None)
        add = queue.add_lines

        async def slow(store: BatchStore, lines: Any) -> None:
            await add(store, lines)
            await files.delete_file(store, "me", file.id)

        monkeypatch.setattr(queue, "add_lines", slow)
        (batch,) = [each for each in await queue.active_batches(store) if each.id == made.id]
        await validate.validate(store, batch, 50_000, 1 << 20)
        found = await queue.find_batch(store, "me", made.id)
        assert found is not None and found.status == "failed" and found.errors is not None
        assert [error.code for error in found.errors.data] == ["file_deleted"]
        assert not await queue.open_lines(store, made.id, 0, 10)
        await store.close()

    asyncio.run(scenario())


def test_a_copy_is_deleted_when_its_client_leaves(front: serving.Process) -> None:
    file = _uploaded(front, b"x" * NUM_BYTES)
    opened = len(_files_of(front))
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=serving.PATIENCE_S)
    connection.request("GET", f"{file}/content")
    connection.getresponse().read(1)
    until(lambda: len(_files_of(front)) > opened)
    connection.sock.close()
    connection.close()
    until(lambda: len(_files_of(front)) <= opened)


def _files_of(front: serving.Process) -> list[str]:
    """Deleted files that the gateway has open; copies have no names."""
    found = []
    for link in Path(f"/proc/{front.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(link.readlink())
            if name.endswith("(deleted)"):
                found.append(name)
    return found
