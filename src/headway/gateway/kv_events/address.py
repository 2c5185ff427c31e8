"""Where engines publish their KV cache events."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec import Struct

from headway.core.errors import HeadwayError


class EventAddress(Struct, frozen=True):
    """Where one engine publishes its KV cache events."""

    endpoint: str
    """Such as `tcp://10.0.0.1:5557`."""
    replay_endpoint: str = ""
    """Where it sends past batches again; empty: it does not."""
    topic: str = ""


class KvEvents(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """For `headway serve`: the engines publish what their prefix caches hold (`--kv-events-config` of vLLM and SGLang).

    In addresses and topic, `{host}` and `{port}` stand for the host and the port of the engine's own address.
    """

    endpoint: str = "tcp://{host}:5557"
    """Where an engine publishes its events. ZeroMQ's `ipc://PATH` works on one machine."""
    replay_endpoint: str = ""
    """Where an engine sends past batches of events again. Without one, what was stored before the gateway began, and
    batches that are lost, stay unknown."""
    topic: str = ""
    """The topic of the events."""
    tokenizer: str = ""
    """The model's files on the gateway's machine: a folder with `tokenizer.json` and chat template, or a
    `tokenizer.json`. Prompts are then tokenized here, if that gives an engine's tokens; without it, by the engine."""

    def address(self, url: str) -> EventAddress:
        """The address for the engine at `url`. HeadwayError if a value has another placeholder."""
        parts = urlsplit(url)
        names = {"host": parts.hostname or "", "port": parts.port or (443 if parts.scheme == "https" else 80)}
        values = []
        for name in ("endpoint", "replay_endpoint", "topic"):
            value: str = getattr(self, name)
            try:
                values.append(value.format(**names))
            except (LookupError, ValueError):
                what = f"{name}: {value!r}; expected no placeholders but {{host}} and {{port}}"
                raise HeadwayError(what) from None
        return EventAddress(*values)
