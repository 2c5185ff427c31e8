"""Read results of load generators: JSON of vLLM's `benchmark_serving` (`vllm bench serve`) and of guidellm."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from headway import catalog
from headway.calibration.overhead import ServedLoad
from headway.core.errors import HeadwayError
from headway.core.fleet import GREEDY, Model

NEEDED = ("completed", "duration", "total_input_tokens", "total_output_tokens", "mean_ttft_ms", "mean_tpot_ms")
"""Required keys of vLLM's file."""
METRICS = (
    "prompt_token_count", "output_token_count", "request_latency", "time_to_first_token_ms", "requests_per_second",
)  # fmt: skip
"""Required metrics of guidellm's file, each with `successful: {mean: ...}`."""
SHORTEST_S = 1e-4
"""Shortest plausible time per token."""
LONGEST_S = 100.0
TP_KEYS = ("tp", "tensor_parallel_size", "tp_size")


class BenchmarkSettings(Struct, frozen=True):
    """Settings of a run that its file does not give."""

    model: Model | None = None
    tp: int | None = None
    max_num_batched_tokens: int = 8192


def is_benchmark(path: Path) -> bool:
    """Whether a file is JSON, by its name or its first character."""
    if path.suffix in (".json", ".jsonl"):
        return True
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"{", b"[")
    except OSError:
        return False


def read(path: Path, settings: BenchmarkSettings) -> tuple[list[ServedLoad], list[str]]:
    """Return the loads in a file, and the runs that were skipped, with reasons.

    Prompts count as uncached, which is wrong for benchmarks with prefix caching or repeated prompts.
    HeadwayError if the file has neither format, lacks a required key, or names an unknown model.
    """
    loads: list[ServedLoad] = []
    skipped: list[str] = []
    seen: dict[tuple[float, ...], str] = {}
    for where, run in _runs(path):
        numbers = _numbers(run, where)
        if why := _fault(numbers):
            skipped.append(f"{where}: {why}")
            continue
        if (key := tuple(numbers.values())) in seen:
            skipped.append(f"{where}: the same as {seen[key]}")
            continue
        seen[key] = where
        loads.append(_load(run, numbers, where, settings))
    if not loads:
        raise HeadwayError(f"{path}: no run that can be used: {'; '.join(skipped) or 'the file holds none'}")
    return loads, skipped


def _runs(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for i, document in enumerate(_documents(path)):
        if not isinstance(document, dict):
            raise HeadwayError(f"{path}: expected JSON objects, found {type(document).__name__}")
        if isinstance(document.get("benchmarks"), list):
            for j, run in enumerate(document["benchmarks"]):
                where = f"{path}: benchmarks[{j}]"
                if not isinstance(run, dict):
                    raise HeadwayError(f"{where}: expected an object, found {type(run).__name__}")
                yield where, {**run, "headway_args": document.get("args") or document.get("config") or {}}
        else:
            yield f"{path}: run {i + 1}", document


def _documents(path: Path) -> list[Any]:
    """The objects of a JSON file: one, a list, or one per line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HeadwayError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwayError(f"{path}: cannot be read as text: {error}") from None
    try:
        document = json.loads(text)  # json accepts the NaN that load generators write
        return document if isinstance(document, list) else [document]
    except ValueError as error:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise HeadwayError(f"{path}: not valid JSON: {error}") from None


def _numbers(run: Mapping[str, Any], where: str) -> dict[str, float]:
    """Rate, mean lengths, and mean latencies in seconds, of a run."""
    if "metrics" in run:
        return _guidellm(run, where)
    if missing := [name for name in NEEDED if run.get(name) is None]:
        raise HeadwayError(f"{where}: neither vLLM's nor guidellm's result: missing {', '.join(missing)}")
    num, duration_s = _number(run, "completed"), _number(run, "duration")
    per_request = 1 / num if num > 0 else math.nan
    return {
        "rate_rps": num / duration_s if duration_s > 0 else math.nan,
        "prompt_tokens": _number(run, "total_input_tokens") * per_request,
        "output_tokens": _number(run, "total_output_tokens") * per_request,
        "ttft_s": _number(run, "mean_ttft_ms") / 1e3,
        "tpot_s": _number(run, "mean_tpot_ms") / 1e3,
        "e2e_s": _number(run, "mean_e2el_ms") / 1e3 if "mean_e2el_ms" in run else math.inf,
        "itl_s": _number(run, "mean_itl_ms") / 1e3 if "mean_itl_ms" in run else math.inf,
    }


def _guidellm(run: Mapping[str, Any], where: str) -> dict[str, float]:
    metrics = run["metrics"]
    if not isinstance(metrics, dict):
        raise HeadwayError(f"{where}: metrics: expected an object")
    missing = [name for name in METRICS if name not in metrics]
    if missing:
        raise HeadwayError(f"{where}: metrics: missing {', '.join(missing)}")
    mean = {name: _mean(value) for name, value in metrics.items()}
    e2e_s, ttft_s, tokens = mean["request_latency"], mean["time_to_first_token_ms"] / 1e3, mean["output_token_count"]
    return {
        "rate_rps": mean["requests_per_second"],
        "prompt_tokens": mean["prompt_token_count"],
        "output_tokens": tokens,
        "ttft_s": ttft_s,
        "tpot_s": (e2e_s - ttft_s) / (tokens - 1) if tokens > 1 else math.nan,
        "e2e_s": e2e_s,
        "itl_s": mean.get("inter_token_latency_ms", math.inf) / 1e3,
    }


def _mean(value: Any) -> float:
    """Mean of a metric over the requests that succeeded."""
    if isinstance(value, dict):
        value = value.get("successful", value)
    return _number(value, "mean") if isinstance(value, dict) else math.nan


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _fault(n: Mapping[str, float]) -> str:
    """Why a run cannot be used; empty if it can."""
    for name in ("rate_rps", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s"):
        if not 0 < n[name] < math.inf:
            return f"{name} is {n[name]:g}; expected a number above 0"
    if n["output_tokens"] < 2:
        return "one output token a request does not give a time per token"
    if not SHORTEST_S < n["tpot_s"] < LONGEST_S:
        return f"{n['tpot_s']:g} s per output token; is the unit right?"
    implied_s = n["ttft_s"] + n["tpot_s"] * (n["output_tokens"] - 1)
    if n["e2e_s"] < math.inf and not 0.5 < n["e2e_s"] / implied_s < 2:
        return f"E2E of {n['e2e_s']:g} s contradicts TTFT and TPOT, which make {implied_s:g} s: mixed units?"
    if n["itl_s"] < math.inf and not 0.1 < n["itl_s"] / n["tpot_s"] < 10:
        return f"ITL of {n['itl_s']:g} s contradicts TPOT of {n['tpot_s']:g} s: mixed units?"
    return ""


def _load(run: Mapping[str, Any], n: Mapping[str, float], where: str, settings: BenchmarkSettings) -> ServedLoad:
    model = settings.model or _model(run, where)
    if "metrics" not in run:
        model = replace(model, sampling=GREEDY)  # vLLM's client asks for temperature 0 unless told otherwise
    return ServedLoad(
        name=f"{model.name} {n['rate_rps']:.3g}/s, {where}",
        model=model,
        tp=settings.tp or next((int(run[key]) for key in TP_KEYS if str(run.get(key, "")).isdigit()), 1),
        rate_rps=n["rate_rps"],
        prompt_tokens=max(1, round(n["prompt_tokens"])),
        cached_tokens=0,
        output_tokens=max(2, round(n["output_tokens"])),
        tpot_s=n["tpot_s"],
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _model(run: Mapping[str, Any], where: str) -> Model:
    args = run.get("headway_args", {})
    worker = run.get("worker") if isinstance(run.get("worker"), dict) else {}
    name = run.get("model_id") or (args.get("model") if isinstance(args, dict) else None)
    name = name or (worker or {}).get("backend_model")
    if not isinstance(name, str):
        raise HeadwayError(f"{where}: names no model; give --model")
    for candidate in (name, name.rstrip("/").rsplit("/", 1)[-1]):
        try:
            return catalog.model(candidate)
        except HeadwayError as error:
            mistake = error
    raise HeadwayError(f"{where}: {mistake}; or give --model")
