"""Differences between engines' APIs, as a table: paths, metric names, request options and response fields.

Sources: the engines' documentation of their servers (vLLM's and SGLang's production metrics, llama.cpp's
server README). A metric that an engine does not have is unknown, never zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

from msgspec import Struct

from headway.gateway.settings import Api
from headway.gateway.upstream import samples

_MAX_CHARS = 1 << 20
"""Length limit of a page's lines with an adapter's metrics."""
_MAX_RANKS = 1024
"""Largest plausible number of data-parallel ranks. A larger number is not accepted."""


class Adapter(Struct, frozen=True):
    """The API of one kind of engine."""

    api: Api
    health: str = "/health"
    metrics: str | None = "/metrics"
    running: tuple[str, ...] = ()
    """Names of the metric for running requests, the newest first."""
    waiting: tuple[str, ...] = ()
    kv_share: tuple[str, ...] = ()
    """Share of the KV cache in use."""
    host_share: tuple[str, ...] = ()
    """Share of the host memory for preempted requests in use."""
    loras: str = ""
    """Name of a metric. Its labels are the LoRA adapters of running and waiting requests, and its value is the time of
    that state."""
    lists_adapters: bool = False
    """Whether /v1/models lists all LoRA adapters that the engine serves, each with its model as `parent`."""
    ordering: str = ""
    """Name of a metric whose label `ordering` names the engine's ordering: vLLM with `headway.vllm.Scheduler`."""
    kv_blocks: tuple[str, str] | None = None
    """Metrics of engines with `headway.vllm.Scheduler`: the KV blocks that the first waiting request needs, and all KV
    blocks."""
    priority_sign: int | None = None
    """Factor from a tier (0 = most urgent) to the body's `priority`; None: the engine has no such field."""
    token_options: dict[str, bool] = {}
    """Options that add token ids, or token counts, to each chunk."""
    token_fields: tuple[str, ...] = ()
    """The fields added by `token_options`, which clients did not ask for."""
    gives_token_ids: bool = False
    template: str | None = None
    """The path that renders a chat as a prompt. Such an engine also accepts all options of a chat together with a
    prompt."""
    tokenize: str | None = None
    """The path that counts the tokens of a prompt or a chat, given in the format of its requests."""
    detokenize: str | None = None
    """The path that converts tokens to text."""
    has_slots: bool = False
    """Whether the engine runs one request in each of its slots, and reports their number at `/props`."""
    continue_options: dict[str, bool] | None = None
    """Options that continue the last message of a chat instead of answering it; None: not supported."""
    transfers_kv: bool = False
    """Whether one engine can prefill and another can decode. The `kv_transfer_params` of the prefill engine's answer go
    to the decode engine."""
    dual_dispatch: bool = False
    """Whether each engine runs one phase. A request is then sent to a prefill engine and a decode engine at the same
    time."""


ADAPTERS: dict[Api, Adapter] = {
    "vllm": Adapter(
        "vllm",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_share=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        host_share=("vllm:cpu_cache_usage_perc",),
        loras="vllm:lora_requests_info",
        lists_adapters=True,
        ordering="headway:ordering_info",
        kv_blocks=("headway:kv_blocks_demanded", "headway:kv_blocks_total"),
        priority_sign=1,
        token_options={"return_token_ids": True},
        token_fields=("token_ids", "prompt_token_ids", "prompt_text"),
        gives_token_ids=True,
        tokenize="/tokenize",
        detokenize="/detokenize",
        continue_options={"continue_final_message": True, "add_generation_prompt": False},
        transfers_kv=True,
    ),
    "sglang": Adapter(
        "sglang",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_share=("sglang:token_usage",),
        lists_adapters=True,
        priority_sign=-1,
        continue_options={"continue_final_message": True},
        dual_dispatch=True,
    ),
    "llama.cpp": Adapter(
        "llama.cpp",
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        kv_share=("llamacpp:kv_cache_usage_ratio",),
        token_options={"timings_per_token": True},
        token_fields=("timings",),
        template="/apply-template",
        has_slots=True,
        tokenize="/tokenize",
        detokenize="/detokenize",
    ),
    "openai": Adapter("openai", health="/v1/models", metrics=None),
}

_API_BY_PREFIX: tuple[tuple[str, Api], ...] = (("vllm", "vllm"), ("sglang", "sglang"), ("llama", "llama.cpp"))


def api_of(engine: str) -> Api:
    """The API of a catalog's engine."""
    return next((api for prefix, api in _API_BY_PREFIX if engine.startswith(prefix)), "openai")


class Load(Struct, frozen=True):
    """An engine's load by its own metrics; None: unknown."""

    running: int | None = None
    waiting: int | None = None
    kv_share: float | None = None
    loras: tuple[str, ...] = ()
    """LoRA adapters of running requests."""
    loras_waiting: tuple[str, ...] = ()
    """LoRA adapters of waiting requests."""
    max_loras: int | None = None
    host_share: float | None = None
    ordering: str | None = None
    """The engine's ordering with its arguments; None if it reports none."""
    head_share: float | None = None
    """Share of the KV cache that the first waiting request needs; 0 = no request waits."""
    num_ranks: int = 1
    """Number of data-parallel ranks named in the metrics."""
    unclear: tuple[str, ...] = ()
    """Metrics that are unknown because of a label. Each name is followed by the label's name in braces."""


def parse_load(adapter: Adapter, page: str, models: Collection[str] = ()) -> Load:
    """The load on an engine's metrics page. Samples of ranks are added, shares averaged: see `samples`.

    `models`: the engine's names for the model; if the page has several models, only its samples count. A page with too
    many of these metrics gives nothing.
    """
    return _parse(adapter, _text_of(_lines_of(adapter, page.encode(errors="replace"))), models)


class LoadReader:
    """Reads one engine's pages. The lines with the load are parsed only if they have changed.

    Pages begin with the metrics of the process, which always change. The rest, from the engine's own metrics on, is the
    same for an idle engine: it is searched only if its hash has changed. The rest itself would be 50 KB an engine.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        namespace = adapter.running[0].partition(":")[0] if adapter.running else ""
        self._own_start = f"\n{namespace}:".encode()
        self._rest_hash, self._rest_lines = hash(b""), b""
        self._last: tuple[str, Collection[str]] = "", ()
        self._load = _parse(adapter, *self._last)

    def read(self, page: bytes, models: Collection[str]) -> Load:
        """As `parse_load`, for the page's bytes."""
        start = max(page.find(self._own_start), 0)
        rest = page[start:]
        if hash(rest) != self._rest_hash:
            self._rest_hash, self._rest_lines = hash(rest), _lines_of(self._adapter, rest)
        found = _text_of(_lines_of(self._adapter, page[:start]) + b"\n" + self._rest_lines), models
        if found != self._last:
            self._load, self._last = _parse(self._adapter, *found), found
        return self._load


def _parse(adapter: Adapter, page: str, models: Collection[str]) -> Load:
    running, waiting, share = (
        samples.values(names, page, models) for names in (adapter.running, adapter.waiting, adapter.kv_share)
    )
    host_share = samples.values(adapter.host_share, page, models)
    named = (adapter.running, running), (adapter.waiting, waiting), (adapter.kv_share, share)
    loras = _adapters(adapter.loras, page) if adapter.loras else ((), (), None)
    return Load(
        _count(running),
        _count(waiting),
        _share(share),
        *loras,
        _share(host_share),
        _ordering(adapter.ordering, page) if adapter.ordering else None,
        None if adapter.kv_blocks is None else _ratio(*adapter.kv_blocks, page),
        max(min(len(running.by_rank), _MAX_RANKS), 1),
        tuple([f"{names[0]}{{{found.unclear}}}" for names, found in named if found.unclear]),
    )


def _text_of(lines: bytes) -> str:
    """The lines as text; empty if they are too long in total."""
    text = lines.decode(errors="replace")
    return text if len(text) <= _MAX_CHARS else ""


def _lines_of(adapter: Adapter, page: bytes) -> bytes:
    """The lines of a page, or of a part of it, that may be samples of the adapter's metrics."""
    names = (*adapter.running, *adapter.waiting, *adapter.kv_share, *adapter.host_share, *(adapter.kv_blocks or ()))
    names += tuple(filter(None, (adapter.loras, adapter.ordering)))
    page = b"\n" + page
    return b"\n".join([line for lines in _line_patterns(names) for line in lines.findall(page)])


@cache
def _line_patterns(names: tuple[str, ...]) -> list[re.Pattern[bytes]]:
    """Patterns of the lines that begin with one of the names: a pattern for each namespace, such as `vllm:`. Searching
    a page of 50 KB for them takes half as long as comparing each of its lines with the names."""
    by_namespace: dict[str, list[str]] = {}
    for name in names:
        namespace, colon, rest = name.partition(":")
        by_namespace.setdefault(namespace + colon, []).append(re.escape(rest))
    parts = [(re.escape(namespace), "|".join(rests)) for namespace, rests in by_namespace.items()]
    return [re.compile(rf"\n({namespace}(?:{rests})[^\n]*)".encode()) for namespace, rests in parts]


def _count(found: samples.Values) -> int | None:
    total = found.total
    return None if total is None else round(total)


def _share(found: samples.Values) -> float | None:
    mean = found.mean
    return None if mean is None else min(mean, 1.0)


def _adapters(metric: str, page: str) -> tuple[tuple[str, ...], tuple[str, ...], int | None]:
    """Running and waiting LoRA adapters, and the number of slots: the labels of the sample with the latest time."""
    found = re.findall(rf"^{re.escape(metric)}\{{([^}}]*)\}}\s+(\S+)", page, re.MULTILINE)
    times = [(time, labels) for labels, value in found if (time := samples.time(value)) is not None]
    if not times:
        return (), (), None
    labels = dict(re.findall(r'\b(\w+)="([^"]*)"', max(times)[1]))
    running, waiting = (
        tuple(filter(None, (name.strip() for name in labels.get(key, "").split(","))))
        for key in ("running_lora_adapters", "waiting_lora_adapters")
    )
    slots = labels.get("max_lora", "")
    return running, waiting, int(slots) if slots.isdecimal() and len(slots) < 7 else None


def _ratio(numerator: str, denominator: str, page: str) -> float | None:
    part, whole = samples.values((numerator,), page).total, samples.values((denominator,), page).total
    return part / whole if part is not None and whole else None


def _ordering(metric: str, page: str) -> str | None:
    """The label of the sample with value 1. If several engines at one address differ, the first engine's label."""
    for labels in re.findall(rf"^{re.escape(metric)}\{{(.*)\}}\s+1(?:\.0*)?$", page, re.MULTILINE):
        ordering = samples.labels_of(labels).get("ordering")
        if ordering is not None:
            return ordering.replace('\\"', '"')
    return None
