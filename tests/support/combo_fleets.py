"""Fleet files with combos, and what a gateway's metrics say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from serving import MODEL, Process, answer_text, chat, send, until

LONG = "a prompt of some length " * 40
STRICT = {"routing": {"name": "cauchy", "within": "strict"}}


def combo_file(folder: Path, prefill: list[str], decode: list[str], **changes: Any) -> Path:
    """A fleet of one combo of vLLM engines; `changes` are sections of the file."""
    side = {"model": MODEL, "gpu": "h100", "engine": "vllm-0.15"}
    combo = {"name": "pair", "prefill": {**side, "endpoints": prefill}, "decode": {**side, "endpoints": decode}}
    combo |= {"handover": {"first_token": "decode"}, **changes.pop("combo", {})}
    # One attempt more than two failures need: an engine may close an idle connection as a request is sent on it.
    settings = {"scrape_period_s": 0.1, "max_attempts": 4, **changes.pop("gateway", {})}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"combos": [combo], "policies": STRICT, "gateway": settings, **changes}))
    return path


def pair_file(folder: Path, prefill: list[str], decode: list[str], num: int = 1, **changes: Any) -> Path:
    """A fleet of `num` instances of a combo of single-phase SGLang engines."""
    side = {"model": MODEL, "gpu": "h100", "engine": "sglang"}
    combo = {
        "name": "pair",
        "prefill": {**side, "endpoints": prefill},
        "decode": {**side, "endpoints": decode},
        "replicas": num,
        **changes.pop("combo", {}),
    }
    # One attempt more than two failures need: an engine may close an idle connection as a request is sent on it.
    settings = {"scrape_period_s": 0.1, "max_attempts": 4, **changes.pop("gateway", {})}
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"combos": [combo], "policies": STRICT, "gateway": settings, **changes}))
    return path


def prefills(process: Process, outcome: str) -> int:
    """Number of prefills for another replica with this outcome."""
    lines = send(process, "/metrics").text().splitlines()
    return sum(
        int(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("headway_prefills_total") and f'outcome="{outcome}"' in line
    )


def drained_stream(front: Process, admin: dict[str, str], num_tokens: int) -> tuple[int, str]:
    """A stream whose replica is drained meanwhile: the replica, and the text. Waits until the replica is empty."""
    reply = chat(front, LONG, stream=True, max_tokens=num_tokens)
    events = reply.events()
    first = [next(events) for _ in range(5)]
    id = int(reply.headers["x-headway-replica"][-1])
    send(front, f"/workers/{id}/drain", b"", admin, "POST").close()
    until(lambda: flight(front, "pair-") == 1 and send(front, f"/workers/{id}", None, admin).json()["empty"])
    return id, answer_text([*first, *events])


def flight(process: Process, pool: str) -> int:
    """Requests at the replicas of the pools whose names have this prefix."""
    lines = send(process, "/metrics").text().splitlines()
    start = f'headway_requests_in_flight{{pool="{pool}'
    return sum(int(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))
