"""What each metric means. `docs/metrics.md` is written from here."""

from __future__ import annotations

import sys

from headway.metrics.summary import PARTS

OVER = {
    "count": "how many values there are",
    "mean": "arithmetic mean",
    "p50": "median",
    "p90": "90th percentile",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "max": "largest value",
    "peak": "largest value",
    "new": "of replicas on newly acquired GPUs",
    "reclaimed": "of replicas that were spot instances of their model",
    "redeployed": "of replicas that were spot instances of another model",
}
"""Last words of a key."""

DEFINITIONS: dict[str, tuple[str, str]] = {
    "num_requests": ("requests", "Requests that arrived after the warm-up, whatever became of them."),
    "num_completed": ("requests", "Requests that finished."),
    "num_cancelled": ("requests", "Requests whose client gave up."),
    "num_rejected": (
        "requests",
        "Requests that no replica would take: queues full, or larger than any KV cache.",
    ),
    "num_unfinished": ("requests", "Requests still in the system when the run stopped."),
    "ttft_s": ("s", "Time to first token: arrival to first output token, of every request that got one."),
    "answer_s": (
        "s",
        "Time to first answering token: arrival to the first token after the reasoning, of requests that reason.",
    ),
    "tpot_s": (
        "s",
        "Time per output token: (last token - first token) / (output tokens - 1), one value per finished "
        "request with at least two output tokens.",
    ),
    "itl_s": (
        "s",
        "Inter-token latency: the gap between two consecutive tokens of a request, one value per gap, over"
        " all requests together (not a mean of means). Gaps over preemptions, crashes and moves are "
        "included; per replica they are left out.",
    ),
    "e2e_s": ("s", "End-to-end latency: arrival to last token, of finished requests."),
    "queueing_s": ("s", "Arrival to the start of the first prefill, of every request whose prefill began."),
    "reasoning_s": ("s", "Arrival to the last reasoning token, of requests that reason and answer."),
    "ttfat_s": (
        "s",
        "Time to first answering token from the end of the reasoning: last reasoning token to first answering token.",
    ),
    "blocking_s": (
        "s",
        "Last reasoning token to the start of the iteration that made the first answering token: how long an answer "
        "was kept from beginning by its queue, a preemption or a move.",
    ),
    "qoe_violations": (
        "share",
        "Share of the answers with a quality of experience (QoE) below 0.95, of requests that began to answer; where "
        "requests reason. QoE is the area under the curve of tokens read / the area under that of tokens wanted, up "
        "to when the last token has been read. Tokens are wanted at the pacer's pace from the end of the reasoning "
        "(of the arrival, without) and its TTFAT target on, or from the first token if it has no such target.",
    ),
    "slo_attainment": (
        "share",
        "Share of the requests with an SLO that met all of theirs. A request that did not finish has missed them.",
    ),
    "slo_ttft_attainment": ("share", "Share of the requests with a TTFT SLO that finished and met it."),
    "slo_tpot_attainment": (
        "share",
        "Share of the requests with a TPOT SLO that finished and met it. A single output token cannot miss it.",
    ),
    "slo_e2e_attainment": (
        "share",
        "Share of the requests with an E2E SLO (or a deadline, where there is no such SLO) that finished and met it.",
    ),
    "goodput_rps": ("requests/s", "Requests that met all their SLOs, per second of the window."),
    "throughput_rps": ("requests/s", "Finished requests, per second of the window."),
    "output_tokens_per_s": (
        "tokens/s",
        "Output tokens, of unfinished requests too, per second of the window.",
    ),
    "total_tokens_per_s": (
        "tokens/s",
        "Output tokens, and prompt tokens of requests that got a first token, per second of the window.",
    ),
    "output_tokens": ("tokens", "Output tokens that came, of unfinished requests too."),
    "preemptions": ("times", "How often a running request was taken out of its batch to make room."),
    "moves": ("times", "How often a request went on at another replica."),
    "retries": ("times", "How often a request was placed anew after its replica crashed."),
    "cached_prompt_share": (
        "share",
        "Prefix-cache hits: prompt tokens served from a cache at first admission / prompt tokens, of "
        "admitted requests.",
    ),
    "kv_use": (
        "share",
        "KV tokens of decoding requests / KV capacity, over the time that replicas were up (idle time counts as 0).",
    ),
    "batch_size": ("requests", "Decoding requests in the batch, over the time that a batch ran."),
    "busy_share": ("share", "Time that a batch ran / time that replicas were up."),
    "gpu_hours": ("GPU h", "GPUs x hours paid for. A crashed replica is paid for while it is down."),
    "usd": ("$", "What those GPU hours cost."),
    "usd_per_million_output_tokens": ("$/M tokens", "Cost / output tokens, times a million."),
    "warmup_s": ("s", "Length of the warm-up that is left out."),
    "window_s": ("s", "Length of the window: from the end of the warm-up to the end of the run."),
    "quality": (
        "0-100",
        "Mean of what the answers of finished requests are worth, by the workload's scores of the model that answered.",
    ),
    "judged": ("answers", "Answers of a cascade that a judge was asked about, of finished requests."),
    "judge_usd": ("$", "What judging them cost; not part of `usd`."),
    "starts": ("replicas", "Replicas that scaling started; where it changed anything, as the next two."),
    "starting_gpu_hours": (
        "GPU h",
        "GPUs x hours from asking for a replica to its serving: paid for (they are part of `gpu_hours`), and wasted.",
    ),
    "spot_gpu_hours": (
        "GPU h",
        "GPUs x hours of replicas given back, until they are taken back or the run ends: what can be leased as spot "
        "instances.",
    ),
    "gpu_hours_bound": (
        "GPU h",
        "Where a scaler is: no plan that serves the trace in time has less in `gpu_hours`, whatever it knows. In time: "
        "95% of each tier's first tokens, and deadlines. A replica counts as if every batch were its best.",
    ),
    "gpu_hours_clairvoyant": (
        "GPU h",
        "With `--clairvoyant`: `gpu_hours` of the best timetable found by one who knows the trace, simulated, serving "
        "in time; none where none was found.",
    ),
    "transfer_s": ("s", "How long the KV cache of a request that went on at another replica was on its way."),
}
"""Metric -> (unit, definition). A metric of several numbers has keys `METRIC.LAST`, `LAST` one of `OVER`."""

BREAKDOWNS: dict[str, str] = {
    "tier.N": "Requests of tier N; where there is more than one tier.",
    "model.NAME": (
        "Requests by the model that served them (that they asked for, if none did), with the cost and use "
        "of that model's replicas; where there is more than one model."
    ),
    "region.NAME": "Requests by the region they came from; where there is more than one region.",
    "replica.N": "Requests by the replica they were last placed on, with that replica's cost and use.",
}
"""First words of a key -> which requests."""


def unit(key: str) -> str:
    """Of a flat key, such as `tier.0.ttft_s.p99`."""
    words = key.split(".")
    if words[-1] == "count":
        return "values"
    return next(DEFINITIONS[word][0] for word in reversed(words) if word in DEFINITIONS)


def markdown() -> str:
    """The page on metrics."""
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
    for name, (measured_in, definition) in DEFINITIONS.items():
        several = PARTS[name].__struct_fields__ if name in PARTS else ()
        lasts = ", ".join(f"`.{last}`" for last in several)
        lines.append(f"| `{name}`{': ' if lasts else ''}{lasts} | {measured_in} | {definition} |")
    lines += ["", "## Last words of a key", "", "| Word | Meaning |", "|---|---|"]
    lines += [f"| `.{last}` | {meaning} |" for last, meaning in OVER.items()]
    lines += ["", "## Breakdowns", "", "The same keys with words in front, as in `tier.0.ttft_s.p99`.", ""]
    lines += ["| In front | Which requests |", "|---|---|"]
    lines += [f"| `{front}.` | {meaning} |" for front, meaning in BREAKDOWNS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
