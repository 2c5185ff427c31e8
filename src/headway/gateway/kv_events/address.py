"""Addresses at which engines publish their KV cache events."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from headway.core.errors import HeadwayError


class EventAddress(Struct, frozen=True):
    """The address at which one engine publishes its KV cache events."""

    endpoint: str
    """Address such as `tcp://10.0.0.1:5557`."""
    replay_endpoint: str = ""
    """The address at which the engine sends past batches again; empty if there is none."""
    topic: str = ""


class KvEvents(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: the engines publish the contents of their prefix caches (`--kv-events-config` of vLLM and
    SGLang).

    In addresses and topic, `{host}` and `{port}` stand for the host and the port of the engine's own address, and
    `{rank}` for the data-parallel rank.
    """

    endpoint: str = "tcp://{host}:5557"
    """The address at which an engine publishes its events. ZeroMQ's `ipc://PATH` works on one machine. With several
    data-parallel ranks, this is the first rank's address; the other ranks use the following ports."""
    replay_endpoint: str = ""
    """The address at which an engine sends past batches of events again. Unset: lost batches, and blocks stored before
    the gateway's start, stay unknown. Leave room between this port and the ports of the ranks' events."""
    topic: str = ""
    """The topic of the events."""
    ranks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Data-parallel ranks of an engine (`--data-parallel-size`), each with its own cache and publisher. Default: the
    pool's `dp`, or as many ranks as the engine's metrics name."""
    tokenizer: str = ""
    """The model's files on the gateway's machine: a folder with `tokenizer.json` and a chat template, or a
    `tokenizer.json`. The gateway then tokenizes prompts itself if the tokens agree with an engine's. Unset: the engine
    tokenizes."""

    def address(self, url: str, rank: int = 0) -> EventAddress:
        """The event address of a rank of the engine at `url`. Raises HeadwayError if a value has another placeholder,
        or no port from which the rank's port follows."""
        parts = urlsplit(url)
        names = {
            "host": parts.hostname or "",
            "port": parts.port or (443 if parts.scheme == "https" else 80),
            "rank": rank,
        }
        values = []
        for name in ("endpoint", "replay_endpoint", "topic"):
            value: str = getattr(self, name)
            try:
                found = value.format(**names)
            except (LookupError, ValueError):
                what = f"{name}: {value!r}; expected no placeholders but {{host}}, {{port}} and {{rank}}"
                raise HeadwayError(what) from None
            if rank and name != "topic" and value and "{rank}" not in value:
                found = _at_rank(name, found, rank)
            values.append(found)
        return EventAddress(*values)

    def check(self, num_ranks: int) -> None:
        """Raises HeadwayError if addresses of so many ranks cannot be made, or if two of them are equal."""
        by_use: dict[str, str] = {}
        for rank in range(num_ranks):
            address = self.address("http://localhost:8000", rank)
            for name in ("endpoint", "replay_endpoint"):
                value = getattr(address, name)
                use = f"the {name} of rank {rank}"
                if value and value in by_use and by_use[value] != use:
                    what = f"{value} is {by_use[value]}, and {use}"
                    raise HeadwayError(f"{what}; expected ports with room for {num_ranks} ranks between them")
                by_use[value] = use


def _at_rank(name: str, endpoint: str, rank: int) -> str:
    """The endpoint of a rank: its port is the first rank's port plus the rank, as in vLLM and SGLang."""
    before, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal():
        raise HeadwayError(
            f"{name}: {endpoint!r} has no port for rank {rank}; expected tcp://HOST:PORT, or {{rank}} in it"
        )
    return f"{before}:{int(port) + rank}"
