"""Calls of the picker leave no reference cycles, however they end: `tests/gateway/server/test_garbage.py` says why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

from ext_proc import CHAT, Call, Desk, desk, picked
from reference_cycles import left_over
from serving import fleet_file

Ending = Callable[[Call], Awaitable[None]]


async def served(call: Call) -> None:
    call.request()
    await picked(call)
    call.answer(content_type="application/json")
    call.part(b'{"choices":[{"message":{"content":"a"}}]}', is_last=True)


async def refused(call: Call) -> None:
    call.request(body=b"{")
    assert (await picked(call)).status == 400


async def of_no_model(call: Call) -> None:
    call.request(body={**CHAT, "model": "x"})
    assert (await picked(call)).status == 404


async def too_long(call: Call) -> None:
    call.request(body={**CHAT, "max_tokens": 10**7})
    assert (await picked(call)).status == 400


async def left_after(call: Call) -> None:
    call.request()
    await picked(call)


async def failed(call: Call) -> None:
    call.request()
    await picked(call)
    call.answer(500, content_type="application/json")
    call.part(b"{", is_last=True)


async def broken(call: Call) -> None:
    call.request(body={**CHAT, "stream": True})
    await picked(call)
    call.answer(content_type="text/event-stream")
    call.part(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')


@pytest.mark.parametrize(
    "ending",
    [served, refused, of_no_model, too_long, left_after, failed, broken],
    ids=lambda each: each.__name__,
)
def test_no_end_of_a_call_leaves_a_cycle(tmp_path: Path, ending: Ending) -> None:
    async def one(made: Desk) -> None:
        call = made.call()
        try:
            await ending(call)
        finally:
            call.end()
        await made.over()

    async def story() -> None:
        async with desk(fleet_file(tmp_path, ["http://127.0.0.1:9001", "http://127.0.0.1:9002"])) as made:
            await one(made)  # what is made once
            left_over()
            for _ in range(2):
                await one(made)
            await asyncio.sleep(0.01)
            assert not left_over()

    asyncio.run(story())
