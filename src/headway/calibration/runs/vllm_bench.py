"""Results of `vllm bench serve` (`benchmark_serving`): `--save-result`, with or without `--save-detailed`.

SGLang's `bench_serving` writes the same keys. Both count gaps between SSE chunks as `itl`, and an engine puts several
tokens into one chunk at high load, so the time between tokens is taken from E2E and TTFT.
"""

from __future__ import annotations

import math
from typing import Any

from headway.calibration.runs.run import (
    STATISTICS,
    MeasuredRun,
    Object,
    RequestRows,
    latencies_s,
    number,
    run_of,
    settings_in,
)
from headway.core.errors import HeadwayError

NEEDED = ("completed", "duration", "total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms")
MARKS = ("mean_ttft_ms", "mean_tpot_ms", "model_id", "total_output_tokens", "completed")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls")
"""Keys of `--save-detailed`, each with one entry per request."""


def is_result(document: Object) -> bool:
    return sum(mark in document for mark in MARKS) >= 1


def read(document: Object, where: str) -> MeasuredRun:
    """The run of a result. Raises HeadwayError if required keys are missing, or details contradict each other."""
    if missing := [name for name in NEEDED if document.get(name) is None]:
        raise HeadwayError(f"{where}: not a whole result of vllm bench serve: missing {', '.join(missing)}")
    load = _load(document)
    if all(isinstance(document.get(name), list) for name in DETAILS):
        rows, num_failed = _rows(document, where)
        if num_failed:
            load["notes"] = (*load["notes"], f"{num_failed} requests failed, and are left out")
        return run_of(rows, where, _model(document), duration_s=number(document, "duration"), **load)
    num, duration_s = number(document, "completed"), number(document, "duration")
    per_request = 1 / num if num > 0 else math.nan
    output_tokens = number(document, "total_output_tokens") * per_request
    given = {
        f"{kind}_{name}": number(document, f"{name}_{key}_ms") / 1e3
        for kind, key in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", _e2e_key(document)))
        for name in STATISTICS
    }
    chunks_s = number(document, "mean_itl_ms") / 1e3
    if chunks_s < math.inf and not 0.1 * given["tpot_mean"] < chunks_s < 10 * given["tpot_mean"]:
        given["itl_mean"] = chunks_s  # merged tokens do not explain the difference
    return MeasuredRun(
        where=where,
        model=_model(document),
        num_requests=int(num) if num > 0 else 0,
        rate_rps=num / duration_s if duration_s > 0 else math.nan,
        prompt_tokens=number(document, "total_input_tokens") * per_request,
        output_tokens=output_tokens,
        latencies_s=latencies_s(given, output_tokens),
        **load,
    )


def _e2e_key(document: Object) -> str:
    """The key of E2E latency in vLLM's or SGLang's results."""
    return "e2e_latency" if "mean_e2e_latency_ms" in document else "e2el"


def _is_sglang(document: Object) -> bool:
    return isinstance(document.get("server_info"), dict) or "mean_e2e_latency_ms" in document


def _model(document: Object) -> str:
    name = document.get("model_id")
    return name if isinstance(name, str) else ""


def _load(document: Object) -> dict[str, Any]:
    """How requests were sent. A rate of `inf` sends all at once, or as many as `max_concurrency` allows."""
    rate = number(document, "request_rate")
    burstiness = number(document, "burstiness")
    limit = number(document, "max_concurrency")
    is_greedy, notes = _sampling(document)
    server = document.get("server_info")
    settings = settings_in(server) if isinstance(server, dict) else {}
    return {
        "requested_rps": rate if 0 < rate < math.inf else None,
        "burstiness": burstiness if burstiness > 0 else 1.0,
        "concurrency": int(limit) if limit >= 1 else None,
        "is_greedy": is_greedy,
        "settings": settings | settings_in(document),
        "notes": notes,
    }


def _sampling(document: Object) -> tuple[bool, tuple[str, ...]]:
    """Whether requests asked for temperature 0, and a note if the file does not tell.

    vLLM's client sends no temperature since 0.17, whose files have `rtfx`. Before, it sent 0, like SGLang's client.
    """
    temperature = document.get("temperature")
    if temperature is not None:
        return str(temperature) in ("0", "0.0"), ()
    if "rtfx" in document and not _is_sglang(document):
        note = (
            "names no temperature: taken for the model's own sampling, as engines do for requests without one;"
            ' add "temperature": 0 to the file for greedy requests'
        )
        return False, (note,)
    return True, ()


def _rows(document: Object, where: str) -> tuple[RequestRows, int]:
    """The requests that succeeded, and the number of other requests."""
    prompts, outputs, ttfts, itls = (document[name] for name in DETAILS)
    lengths = {name: len(document[name]) for name in DETAILS}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {num}" for name, num in lengths.items())
        raise HeadwayError(f"{where}: details of unequal length: {counts}")
    starts = document.get("start_times")
    starts = starts if isinstance(starts, list) and len(starts) == len(prompts) else [math.nan] * len(prompts)
    errors = document.get("errors")
    errors = errors if isinstance(errors, list) and len(errors) == len(prompts) else [""] * len(prompts)
    rows = []
    for i, (start, prompt, output, ttft, gaps, error) in enumerate(
        zip(starts, prompts, outputs, ttfts, itls, errors, strict=True)
    ):
        if error or not output:
            continue
        try:
            rows.append((float(start), float(prompt), float(output), float(ttft), float(ttft) + sum(gaps), math.nan))
        except (TypeError, ValueError):
            what = "expected numbers in start_times, input_lens, output_lens and ttfts, and lists of numbers in itls"
            raise HeadwayError(f"{where}: request {i}: {what}") from None
    return RequestRows.of(rows), len(prompts) - len(rows)
