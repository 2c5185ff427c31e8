"""Workers in the process of the test, whose links lead to a gateway beside them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gateway_in_process import Inside
from headway.gateway.server.completions import CompletionsApp
from headway.gateway.workers.protocol import WorkerConfig, frame, receive_config
from headway.gateway.workers.session import WorkerSession
from headway.gateway.workers.worker import Worker


def hire(inside: Inside, num: int) -> list[Worker]:
    """From now on requests come in by workers, one after the other."""
    workers = [inside.run(_hired(inside)) for _ in range(num)]
    apps = [CompletionsApp() for _ in workers]
    for each, worker in zip(apps, workers, strict=True):
        each.gateway = worker
    turns = iter(range(1 << 30))

    async def app(*message: Any) -> None:
        await apps[next(turns) % num](*message)

    inside.app = app  # type: ignore[assignment]
    return workers


async def _hired(inside: Inside) -> Worker:
    ours, theirs = socket.socketpair()
    gateway = inside.gateway
    ours.sendall(frame(WorkerConfig(gateway.settings, None, False, gateway.clock.start_s, "", None, None)))
    worker = Worker(receive_config(theirs), lambda: None)
    loop = asyncio.get_running_loop()
    session = WorkerSession(gateway, lambda: None, lambda: None, lambda: None)
    for link, end in ((session.link, ours), (worker.scheduler.link, theirs)):
        end.setblocking(False)
        await loop.create_unix_connection(lambda link=link: link, sock=end)  # type: ignore[misc]
    return worker


def has_heard(inside: Inside, workers: list[Worker]) -> bool:
    """The scheduler knows that all requests of the workers have ended."""
    return not (inside.num_in_flight or any(worker.scheduler.requests for worker in workers))
