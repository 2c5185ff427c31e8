"""The engines' dialects, as a table: where they say how they are, and what they can be told.

Sources: the engines' documentation of their servers (vLLM's and SGLang's production metrics, llama.cpp's
server README). A metric that an engine does not have is unknown, never zero.
"""

from __future__ import annotations

import re

from msgspec import Struct

from headway.gateway.settings import Api


class Adapter(Struct, frozen=True):
    """One dialect."""

    api: Api
    health: str = "/health"
    metrics: str | None = "/metrics"
    running: tuple[str, ...] = ()
    """Names of the metric for requests that run, the newest first."""
    waiting: tuple[str, ...] = ()
    kv_share: tuple[str, ...] = ()
    """Share of the KV cache that is in use."""
    urgent_sign: int | None = None
    """What a tier (0 = most urgent) is multiplied with to be the body's `priority`; None: it takes none."""
    counts: dict[str, bool] = {}
    """What makes it say with each chunk which tokens it read and wrote, or how many."""
    hides: tuple[str, ...] = ()
    """What chunks then have that clients have not asked for."""
    gives_token_ids: bool = False
    """It says which."""
    template: str | None = None
    """Where it says what text it makes of a chat; it takes any of its options for a prompt that is given as such."""
    continues_chats: dict[str, bool] | None = None
    """What makes it go on with the last message of a chat in place of answering it; None: nothing does."""
    hands_over: bool = False
    """One engine can decode what another has prefilled, by what the first says of where the KV cache is."""
    together: bool = False
    """It can, too, but each is started for one phase, and a request is sent to both at the same time."""


ADAPTERS: dict[Api, Adapter] = {
    "vllm": Adapter(
        "vllm",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_share=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        urgent_sign=1,
        counts={"return_token_ids": True},
        hides=("token_ids", "prompt_token_ids", "prompt_text"),
        gives_token_ids=True,
        continues_chats={"continue_final_message": True, "add_generation_prompt": False},
        hands_over=True,
    ),
    "sglang": Adapter(
        "sglang",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_share=("sglang:token_usage",),
        urgent_sign=-1,
        continues_chats={"continue_final_message": True},
        together=True,
    ),
    "llama.cpp": Adapter(
        "llama.cpp",
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_share=("llamacpp:kv_cache_usage_ratio",),
        counts={"timings_per_token": True},
        hides=("timings",),
        template="/apply-template",
    ),
    "openai": Adapter("openai", health="/v1/models", metrics=None),
}

_OF_ENGINE: tuple[tuple[str, Api], ...] = (("vllm", "vllm"), ("sglang", "sglang"), ("llama", "llama.cpp"))


def api_of(engine: str) -> Api:
    """The dialect of a catalog's engine."""
    return next((api for start, api in _OF_ENGINE if engine.startswith(start)), "openai")


_MOST = 1e9
"""No engine has so many requests."""


class Load(Struct, frozen=True):
    """What an engine says about itself; None: unknown."""

    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None


def load(adapter: Adapter, text: str) -> Load:
    """What an engine's metrics page says. Samples of one name (one per rank) add up; shares are averaged."""
    running, waiting, share = (_values(names, text) for names in (adapter.running, adapter.waiting, adapter.kv_share))
    return Load(
        round(sum(running)) if running else None,
        round(sum(waiting)) if waiting else None,
        min(sum(share) / len(share), 1.0) if share else None,
    )


def _values(names: tuple[str, ...], text: str) -> list[float]:
    for name in names:
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})?\s+(\S+)", text, re.MULTILINE)
        if found:
            return [value for value in map(_number, found) if value is not None]
    return []


def _number(text: str) -> float | None:
    """A sample's value. None where an engine says what cannot be."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < _MOST else None
