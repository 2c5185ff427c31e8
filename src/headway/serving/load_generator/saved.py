"""Saves a load as records, which simulations replay, and in the JSON of `vllm bench serve --save-result
--save-detailed`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from msgspec.structs import replace

from headway.control.recorder import Recorder
from headway.core.record import (
    MOVE_COLUMNS,
    SEGMENT_COLUMNS,
    STRETCH_COLUMNS,
    Outcome,
    Prefixes,
    Records,
    ReplicaRecord,
)
from headway.records.parts import no_rows
from headway.serving.load_generator.answer import NEVER, Answer
from headway.serving.load_generator.drive import Sent
from headway.serving.load_generator.results import measured, token_gaps_s, tpot_s
from headway.workload.table import Workload

DATE = "%Y%m%d-%H%M%S"


def records(sent: Sequence[Sent], table: Workload, replica: ReplicaRecord) -> Records:
    """The records of a load on one engine. `table`: the issued requests.

    Stopped requests are left out, and the remaining requests are numbered again. Lengths are the engine's counts.
    """
    kept = sorted((each for each in sent if each.outcome is not Outcome.UNFINISHED), key=lambda each: each.request.id)
    rows = table.take(np.array([each.request.id for each in kept], "i8"))
    shared = np.zeros(len(kept), "i8")
    if rows.prefix is not None:
        sums = np.concatenate(([0], np.cumsum(rows.prefix.tokens, dtype="i8")))
        shared = sums[rows.prefix.offsets[1:]] - sums[rows.prefix.offsets[:-1]]
    prompts = [each.answer.prompt_tokens or each.request.prompt_tokens for each in kept]
    outputs = [each.answer.output_tokens or each.request.output_tokens for each in kept]
    rows = rows.with_columns({"prompt_tokens": np.maximum(prompts, shared), "output_tokens": outputs})
    recorder = Recorder()
    for i in sorted(range(len(kept)), key=lambda i: _end_s(kept[i].answer)):
        answer = kept[i].answer
        recorder.requests.write((
            i, kept[i].outcome, 1, 0, replica.id, answer.sent_s, NEVER, answer.first_s, answer.first_s, _end_s(answer),
            answer.output_tokens, answer.cached_tokens or 0, NEVER, 0, -1, NEVER,
        ))  # fmt: skip
    end_s = max((_end_s(each.answer) for each in kept), default=0.0)
    prefix = rows.prefix
    return Records(
        workload=rows.columns,
        models=rows.models,
        regions=rows.regions,
        requests=recorder.request_columns(),
        segments=no_rows(SEGMENT_COLUMNS),
        stretches=no_rows(STRETCH_COLUMNS),
        moves=no_rows(MOVE_COLUMNS),
        replicas=(replace(replica, up=((0.0, end_s),)),),
        end_s=end_s,
        tenants=rows.tenants,
        loras=rows.loras,
        prefixes=None if prefix is None else Prefixes(prefix.offsets, prefix.ids, prefix.tokens),
    )


def _end_s(answer: Answer) -> float:
    """The time of the last token of a complete answer; otherwise the time of the failure."""
    return answer.last_s if answer.is_whole else answer.end_s


def vllm_bench(
    sent: Sequence[Sent],
    model: str,
    began: datetime,
    *,
    rate_rps: float | None,
    burstiness: float,
    concurrency: int | None,
    temperature: float | None,
    endpoint: str,
) -> dict[str, Any]:
    """The output of vLLM's client, with its keys and units, plus `temperature` if requests set one.

    `itls` are gaps between chunks, as in vLLM's output, but the statistics are over tokens.
    """
    chosen = sorted((each for each in sent if each.outcome is not Outcome.UNFINISHED), key=lambda each: each.request.id)
    answers = [each.answer for each in chosen]
    good = [each for each in answers if each.is_whole]
    found = measured(chosen)
    prompts = [each.answer.prompt_tokens or each.request.prompt_tokens for each in chosen]
    result: dict[str, Any] = {
        "date": began.strftime(DATE), "endpoint_type": endpoint, "backend": endpoint, "label": None, "model_id": model,
        "tokenizer_id": model, "num_prompts": len(chosen), "request_rate": "inf" if rate_rps is None else rate_rps,
        "burstiness": burstiness, "max_concurrency": concurrency, "rtfx": 0.0,
        "duration": found.duration_s, "completed": found.num_completed, "failed": len(chosen) - found.num_completed,
        "total_input_tokens": found.prompt_tokens, "total_output_tokens": found.output_tokens,
        "request_throughput": found.throughput_rps, "request_goodput": None,
        "output_throughput": found.output_tokens_per_s, "total_token_throughput": found.total_tokens_per_s,
        "input_lens": prompts, "output_lens": [each.output_tokens for each in answers],
        "ttfts": [each.first_s - each.sent_s if each.is_whole else 0.0 for each in answers],
        "itls": [np.diff(each.chunk_s).tolist() if each.is_whole else [] for each in answers],
        "start_times": [each.sent_s for each in answers],
        "generated_texts": [each.text for each in answers],
        "errors": [each.error or each.kind for each in answers], "max_concurrent_requests": _most_in_flight(answers),
        **({} if temperature is None else {"temperature": temperature}),
    }  # fmt: skip
    latencies = {
        "ttft": [each.first_s - each.sent_s for each in good],
        "tpot": [tpot_s(each) for each in good],
        "itl": [gap for each in good for gap in token_gaps_s(each).tolist()],
        "e2el": [each.last_s - each.sent_s for each in good],
    }
    for name, values in latencies.items():
        result |= dict(_statistics(name, [value for value in values if not math.isnan(value)]))
    return result


def _statistics(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    ms = 1e3 * np.array(values or [0.0])
    yield f"mean_{name}_ms", float(ms.mean())
    yield f"median_{name}_ms", float(np.median(ms))
    yield f"std_{name}_ms", float(ms.std())
    for percent in (90, 99):
        yield f"p{percent}_{name}_ms", float(np.percentile(ms, percent))


def _most_in_flight(answers: Sequence[Answer]) -> int:
    changes = sorted([(each.sent_s, 1) for each in answers] + [(each.end_s, -1) for each in answers])
    return max(np.cumsum([change for _, change in changes]).tolist(), default=0)
