"""The definition of each metric. `docs/metrics.md` is generated from this module."""

from __future__ import annotations

import sys

from headway.metrics.summary import PARTS

OVER = {
    "count": "number of values",
    "mean": "arithmetic mean",
    "p50": "median",
    "p90": "90th percentile",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "max": "largest value",
    "peak": "largest value",
    "new": "replicas on newly acquired GPUs",
    "reclaimed": "replicas that were spot instances of the same model",
    "redeployed": "replicas that were spot instances of another model",
}
"""Last words of a key, with their meaning."""

DEFINITIONS: dict[str, tuple[str, str]] = {
    "num_requests": ("requests", "Requests that arrived after the warm-up, with any outcome."),
    "num_completed": ("requests", "Requests that finished."),
    "num_cancelled": ("requests", "Requests that their client cancelled."),
    "num_rejected": (
        "requests",
        "Requests that no replica could accept: all queues full, or larger than any KV cache. And those that a limit "
        "of their tenant refused.",
    ),
    "num_unfinished": ("requests", "Requests still in the system when the run stopped."),
    "ttft_s": ("s", "Time to first token: arrival to first output token, for requests with a first token."),
    "answer_s": (
        "s",
        "Time to first answering token: arrival to the first token after the reasoning, for requests that reason.",
    ),
    "tpot_s": (
        "s",
        "Time per output token: (last token - first token) / (output tokens - 1), one value per finished "
        "request with at least two output tokens.",
    ),
    "itl_s": (
        "s",
        "Inter-token latency: the gap between two consecutive tokens of a request (with speculative decoding: between "
        "two iterations, as `vllm bench serve` counts), one value per gap, over all requests together "
        "(not a mean of means). Gaps over preemptions, crashes and moves are included, except in the breakdown by "
        "replica.",
    ),
    "e2e_s": ("s", "End-to-end latency: arrival to last token, for finished requests."),
    "queueing_s": ("s", "Arrival to the start of the first prefill, for requests whose prefill began."),
    "reasoning_s": ("s", "Arrival to the last reasoning token, for requests that reason and answer."),
    "ttfat_s": (
        "s",
        "Last reasoning token to first answering token.",
    ),
    "blocking_s": (
        "s",
        "Last reasoning token to the start of the iteration that generated the first answering token: the delay of the "
        "answer by a queue, a preemption or a move.",
    ),
    "qoe_violations": (
        "share",
        "Share of started answers with a quality of experience (QoE) below 0.95, if any request reasons. QoE is the "
        "area under the curve of tokens read / the area under the curve of tokens expected, up to the time when the "
        "last token has been read. Tokens are expected at the pacer's rate, starting at its TTFAT target after the "
        "end of the reasoning (the arrival, without reasoning), or at the first token if the pacer has no target.",
    ),
    "slo_attainment": (
        "share",
        "Share of requests with an SLO that met all of their SLOs. A request that did not finish missed its SLOs.",
    ),
    "slo_ttft_attainment": ("share", "Share of requests with a TTFT SLO that finished and met it."),
    "slo_tpot_attainment": (
        "share",
        "Share of requests with a TPOT SLO that finished and met it. A single output token cannot miss it.",
    ),
    "slo_e2e_attainment": (
        "share",
        "Share of requests with an E2E SLO (else a deadline) that finished and met it.",
    ),
    "goodput_rps": ("requests/s", "Requests that met all their SLOs, per second of the window."),
    "throughput_rps": ("requests/s", "Finished requests, per second of the window."),
    "output_tokens_per_s": (
        "tokens/s",
        "Output tokens, including those of unfinished requests, per second of the window.",
    ),
    "total_tokens_per_s": (
        "tokens/s",
        "Output tokens, and prompt tokens of requests with a first token, per second of the window.",
    ),
    "output_tokens": ("tokens", "Output tokens, including those of unfinished requests."),
    "preemptions": ("times", "Times that a running request was removed from its batch to free memory."),
    "moves": ("times", "Times that a request moved to another replica."),
    "retries": ("times", "Times that a request was placed again after its replica crashed."),
    "cached_prompt_share": (
        "share",
        "Prefix-cache hits: prompt tokens found in a cache at first admission / prompt tokens, for admitted requests.",
    ),
    "refused_by_requests_per_minute": (
        "requests",
        "Requests that were refused because of their tenant's `requests_per_minute` (`simulation: limits:`). They are "
        "part of `num_rejected`; this and the next two keys are only there where tenants have limits.",
    ),
    "refused_by_tokens_per_minute": ("requests", "The same because of `tokens_per_minute`."),
    "refused_by_budget": ("requests", "The same because of `budget_tokens` or `budget_usd`."),
    "kv_use": (
        "share",
        "KV tokens of decoding requests / KV capacity, over the up time of replicas (idle time counts as 0).",
    ),
    "batch_size": ("requests", "Decoding requests in the batch, over the time in which a batch ran."),
    "busy_share": ("share", "Time in which a batch ran / up time of replicas."),
    "gpu_hours": ("GPU h", "GPUs x hours paid for, including the down time of crashed replicas."),
    "usd": ("$", "Cost of the GPU hours, and of the tokens of hosted pools."),
    "usd_per_million_output_tokens": ("$/M tokens", "Cost per million output tokens."),
    "energy_kwh": (
        "kWh",
        "Energy of the GPUs of simulated replicas ([plan-fleet.md](plan-fleet.md#energy)): idle for all GPU hours, "
        "starting and crashed replicas included, and more while a batch runs. Without hosts, cooling and hosted pools.",
    ),
    "joules_per_output_token": (
        "J/token",
        "The same energy per output token; none if a part of the replicas is hosted.",
    ),
    "warmup_s": ("s", "Length of the warm-up, which is excluded."),
    "window_s": ("s", "Length of the window: from the end of the warm-up to the end of the run."),
    "quality": (
        "0-100",
        "Mean score of the answers of finished requests, by the workload's scores of the answering model.",
    ),
    "judged": ("answers", "Answers of a cascade that a judge scored, for finished requests."),
    "judge_usd": ("$", "Cost of judging; not part of `usd`."),
    "starts": (
        "replicas",
        "Replicas that scaling started. Like the next two, only for runs in which the fleet changed.",
    ),
    "starting_gpu_hours": (
        "GPU h",
        "GPUs x hours from requesting a replica until it serves: paid for (part of `gpu_hours`) but unused.",
    ),
    "spot_gpu_hours": (
        "GPU h",
        "GPUs x hours of released replicas, until they are taken back or the run ends: capacity for spot instances.",
    ),
    "gpu_hours_bound": (
        "GPU h",
        "With a scaler: a lower bound on `gpu_hours` of any plan that serves the trace in time, even with full "
        "knowledge of it. In time: 95% of each tier's first tokens, and deadlines. Every batch counts as the "
        "replica's best.",
    ),
    "gpu_hours_clairvoyant": (
        "GPU h",
        "With `--clairvoyant`: `gpu_hours` of the best timetable found with full knowledge of the trace, simulated, "
        "that serves in time; none if none was found.",
    ),
    "num_programs": (
        "programs",
        "With `slo: {program_s: ...}`: programs of agents, or sessions, whose first call arrived in the window.",
    ),
    "program_s": ("s", "Their time from the first arrival to the end of the last call, if all calls finished."),
    "program_slo_attainment": ("share", "Programs that finished within the SLO / programs."),
    "transfer_s": ("s", "Duration of the KV cache transfer of a request that moved to another replica."),
}
"""Unit and definition of each metric. A metric with several numbers has keys `METRIC.LAST`, where `LAST` is one of
`OVER`."""

BREAKDOWNS: dict[str, str] = {
    "tier.N": "Requests of tier N, if there is more than one tier.",
    "model.NAME": (
        "Requests by the model that served them (the requested model, if none did), with the cost and use of that "
        "model's replicas, if there is more than one model."
    ),
    "region.NAME": "Requests by region of origin, if there is more than one region.",
    "tenant.NAME": "Requests by tenant, if there is more than one tenant.",
    "fallback.REASON": (
        "Requests that the model of a fallback pool answered, by the reason: `down`, `rejects` or `slow`, if there are "
        "any."
    ),
    "replica.N": "Requests by their last replica, with that replica's cost and use.",
}
"""First words of a key, and the requests that it covers."""


def unit(key: str) -> str:
    """The unit of a flat key, such as `tier.0.ttft_s.p99`."""
    words = key.split(".")
    if words[-1] == "count":
        return "values"
    return next(DEFINITIONS[word][0] for word in reversed(words) if word in DEFINITIONS)


def markdown() -> str:
    lines = [
        "# Metrics",
        "",
        "<!-- Written by `python -m headway.report.describe > docs/metrics.md`; do not edit. -->",
        "",
        "The keys of `metrics` in `--json`, and the numbers in tables and reports. Times are in seconds,",
        "counted from the start of the workload. The window runs from the end of the warm-up to the end",
        "of the run; requests count if they arrived in it. A metric without data is `null`, not 0.",
        "Percentiles interpolate linearly between order statistics.",
        "",
        "| Key | Unit | Definition |",
        "|---|---|---|",
    ]
    for name, (unit_name, definition) in DEFINITIONS.items():
        several = PARTS[name].__struct_fields__ if name in PARTS else ()
        lasts = ", ".join(f"`.{last}`" for last in several)
        lines.append(f"| `{name}`{': ' if lasts else ''}{lasts} | {unit_name} | {definition} |")
    lines += ["", "## Last words of a key", "", "| Word | Meaning |", "|---|---|"]
    lines += [f"| `.{last}` | {meaning} |" for last, meaning in OVER.items()]
    lines += ["", "## Breakdowns", "", "The same keys with a prefix, as in `tier.0.ttft_s.p99`.", ""]
    lines += ["| Prefix | Requests |", "|---|---|"]
    lines += [f"| `{front}.` | {meaning} |" for front, meaning in BREAKDOWNS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
