"""Reports of inference-perf: `stage_N_` or `summary_lifecycle_metrics.json`, and `per_request_lifecycle_metrics.json`.

They contain no model name. The `config.yaml` in the same folder contains the model and the shared prefixes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headway.calibration.runs.run import MeasuredRun, Object, RequestRows, latencies_s, number, objects, run_of
from headway.core.errors import HeadwayError

CONFIG = "config.yaml"
"""Name of the configuration file in the folder of the reports."""
KEYS = {
    "ttft": "time_to_first_token",
    "tpot": "time_per_output_token",
    "itl": "inter_token_latency",
    "e2e": "request_latency",
}
"""Latencies and their keys; values are in seconds."""


def is_report(document: Object) -> bool:
    """Whether the file is the report of a stage or of all stages."""
    return "load_summary" in document and "successes" in document


def is_request(document: Object) -> bool:
    """Whether an entry of a list is a request's."""
    return {"start_time", "end_time"} <= document.keys() and ("info" in document or "computed_metrics" in document)


def read(document: Object, config: Object, where: str) -> MeasuredRun:
    """The run of one stage. Raises HeadwayError if the report has no latencies."""
    successes = objects(document["successes"], f"{where}: successes")
    load = objects(document["load_summary"], f"{where}: load_summary")
    found = objects(successes.get("latency"), f"{where}: successes.latency")
    if missing := [name for name in ("request_latency", "time_to_first_token") if not found.get(name)]:
        raise HeadwayError(f"{where}: successes.latency: missing {', '.join(missing)}; were answers streamed?")
    prompts = successes.get("prompt_tokens") or successes.get("prompt_len") or {}
    outputs = successes.get("output_tokens") or successes.get("output_len") or {}
    given = {
        f"{kind}_{name}": number(found[key], name)
        for kind, key in KEYS.items()
        if isinstance(found.get(key), dict)
        for name in ("mean", "p90", "p99")
    }
    num, output_tokens = number(successes, "count"), number(outputs, "mean")
    given |= _by_tokens_of_the_engine(given, successes)
    rate = number(load, "requested_rate")
    cached = number(prompts, "cached")
    return MeasuredRun(
        where=where,
        model=_model(config),
        num_requests=int(num) if num > 0 else 0,
        rate_rps=number(successes.get("throughput") or {}, "requests_per_sec"),
        prompt_tokens=number(prompts, "mean"),
        output_tokens=output_tokens,
        latencies_s=latencies_s(given, output_tokens),
        cached_tokens=cached / num if num > 0 and cached > 0 else 0.0,
        **_load(config, rate if rate > 0 else math.nan, number(load, "concurrency")),
    )


def _by_tokens_of_the_engine(given: dict[str, float], successes: Object) -> dict[str, float]:
    """Times between tokens, recomputed with the engine's token counts.

    inference-perf divides by the tokens that its own tokenizer counts in the text (`output_len`), and its
    `inter_token_latency` has one gap per chunk.
    """
    own, engines = (number(successes.get(key) or {}, "mean") for key in ("output_len", "output_tokens"))
    if not (own > 1 and engines > 1):
        return {}
    share = (own - 1) / (engines - 1)
    found = {key: value * share for key, value in given.items() if key.startswith("tpot_")}
    after_s = given.get("e2e_mean", math.nan) - given.get("ttft_mean", math.nan)
    return {**found, "itl_mean": after_s / (engines - 1), "itl_p90": math.nan, "itl_p99": math.nan}


def read_requests(entries: Sequence[Object], config: Object, where: str) -> MeasuredRun:
    """The run that consists of the requests of all stages."""
    rows = [row for entry in entries if not entry.get("error") and (row := _row(entry)) is not None]
    failed = sum(bool(entry.get("error")) for entry in entries)
    unclear = len(entries) - failed - len(rows)
    notes = [
        f"{num} requests {why}, and are left out"
        for num, why in ((failed, "failed"), (unclear, "did not stream"))
        if num
    ]
    return run_of(RequestRows.of(rows), where, _model(config), notes=tuple(notes), **_load(config, math.nan, math.nan))


def _row(entry: Object) -> tuple[float, ...] | None:
    """One request; None if it lacks token times or lengths."""
    start_s, end_s = number(entry, "start_time"), number(entry, "end_time")
    info = entry.get("info") or {}
    computed = entry.get("computed_metrics") or {}
    response = info.get("response_metrics") or info
    usage = response.get("server_usage") or {}
    request = (info.get("request_metrics") or {}).get("text") or info
    prompt = next(filter(_known, (number(computed, "input_tokens"), number(request, "input_tokens"))), math.nan)
    output = next(
        filter(
            _known,
            (number(usage, "completion_tokens"), number(computed, "output_tokens"), number(response, "output_tokens")),
        ),
        math.nan,
    )
    times = response.get("output_token_times") or []
    ttft_s = number(computed, "time_to_first_token")
    if not _known(ttft_s) and times:
        ttft_s = float(times[0]) - start_s
    cached = number(usage.get("prompt_tokens_details") or {}, "cached_tokens")
    row = (start_s, prompt, output, ttft_s, end_s - start_s)
    return (*row, cached) if all(map(_known, row)) else None


def _known(value: float) -> bool:
    return not math.isnan(value)


def _model(config: Object) -> str:
    server = config.get("server")
    name = server.get("model_name") if isinstance(server, dict) else None
    return name if isinstance(name, str) else ""


def _load(config: Object, rate: float, concurrency: float) -> dict[str, Any]:
    """How requests were sent, and their shared prefix by the configuration.

    Gaps between requests are exponential for both of its types with a rate: those of `constant` are random, too, only
    scaled to the stage's duration (seen in 0.7.0).
    """
    data = config.get("data")
    shared = data.get("shared_prefix") if isinstance(data, dict) else None
    settings = {}
    if isinstance(shared, dict) and "shared_prefix" in str(data.get("type", "") if isinstance(data, dict) else ""):
        groups, tokens = number(shared, "num_groups"), number(shared, "system_prompt_len")
        if groups >= 1 and tokens > 0:
            settings = {"num_prefixes": int(groups), "prefix_tokens": int(tokens)}
    return {
        "requested_rps": None if math.isnan(rate) or concurrency >= 1 else rate,
        "burstiness": 1.0,
        "concurrency": int(concurrency) if concurrency >= 1 else None,
        "settings": settings,
    }
