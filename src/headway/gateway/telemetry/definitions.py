"""The gateway's metrics by name: kinds, labels and help texts. docs/gateway-metrics.md is generated from them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Kind = Literal["counter", "gauge", "histogram"]
_SERIES = ("model", "pool", "tier")
_REPLICA = ("pool", "model", "replica", "name")
_EVENTS = ("pool", "model", "replica")


class Definition(Struct, frozen=True):
    """One metric. Counter names end in `_total`."""

    kind: Kind
    labels: tuple[str, ...]
    help: str


def _counter(help: str, *labels: str) -> Definition:
    return Definition("counter", labels, help)


def _gauge(help: str, *labels: str) -> Definition:
    return Definition("gauge", labels, help)


def _histogram(help: str, *labels: str) -> Definition:
    return Definition("histogram", labels, help)


DEFINITIONS = {
    # Requests that have ended.
    "headway_requests_total": _counter("Requests that have ended", *_SERIES, "outcome"),
    "headway_responses_total": _counter(
        "Answers to requests for engines, by HTTP status; 499: the client left before the answer began. "
        "Without path: requests that are no valid HTTP, or that no page of another host may send",
        "path",
        "status",
    ),
    "headway_slo_requests_total": _counter(
        "Requests with SLOs that have ended: met, or missed, as are all that did not finish", "model", "result"
    ),
    "headway_tokens_total": _counter("Tokens of requests that have ended", "model", "kind"),
    "headway_cached_tokens_total": _counter(
        "Tokens of their prompts that were in a prefix cache, by the engines' own counts", "model", "pool"
    ),
    "headway_time_to_first_token_seconds": _histogram(
        "From the arrival of a streamed request to its first token", *_SERIES
    ),
    "headway_time_per_output_token_seconds": _histogram(
        "Mean time between the output tokens of a streamed request, after the first", *_SERIES
    ),
    "headway_inter_token_seconds": _histogram("From one output token of a stream to the next", *_SERIES, "phase"),
    "headway_request_duration_seconds": _histogram("From a request's arrival to its end", *_SERIES),
    "headway_hold_seconds": _histogram("From a request's arrival to its placement on a replica", *_SERIES),
    "headway_gateway_overhead_seconds": _histogram(
        "From a request's last byte to the send to its replica, without the time on hold", *_SERIES
    ),
    "headway_unread_total": _counter(
        "Events and answers of engines that were passed on without being read", "model", "what"
    ),
    # Requests whose engine failed.
    "headway_retries_total": _counter(
        "Requests placed again before their first token, by the pool of the replica that failed", "model", "pool"
    ),
    "headway_failovers_total": _counter(
        "Answers continued after their first token, by the pool of the replica that failed", "model", "pool"
    ),
    "headway_continued_tokens_total": _counter(
        "Tokens with which engines began that continue an answer, computed or cached", "model", "kv"
    ),
    "headway_ejections_total": _counter(
        "Replicas that were taken out of service though they pass their health checks", "model", "reason"
    ),
    "headway_fallbacks_total": _counter(
        "Requests that a fallback of their model was to answer, by the model asked for", "model", "reason"
    ),
    "headway_judgements_total": _counter("Answers of a cascade's models, by the judgement on them", "model", "outcome"),
    "headway_prefills_total": _counter("Prompts to be computed by another replica, by the result", "model", "outcome"),
    # Cost.
    "headway_usd_total": _counter(
        "Dollars so far: replicas by their price an hour since they began, hosted ones by the tokens of ended requests",
        "pool",
        "model",
    ),
    # Current replicas and queues.
    "headway_requests_in_flight": _gauge("Requests at a replica", *_REPLICA),
    "headway_replica_up": _gauge("Whether requests are sent to a replica", *_REPLICA),
    "headway_replica_ejected": _gauge("Whether a replica passes its health checks and gets no requests", *_REPLICA),
    "headway_replica_requests_running": _gauge("Requests in a replica's batch, by the engine's count", *_REPLICA),
    "headway_replica_requests_waiting": _gauge("Requests in a replica's own queue, by the engine's count", *_REPLICA),
    "headway_replica_kv_share": _gauge(
        "Share of a replica's KV cache in use, 0 to 1, by the engine's metrics", *_REPLICA
    ),
    "headway_prediction_ratio": _gauge(
        "Predicted over observed latency of a replica's last requests, median; below 1: slower than predicted",
        *_REPLICA,
        "latency",
    ),
    "headway_step_time_factor": _gauge(
        "Observed over predicted seconds of a replica by what they are spent on: decode, prefill, request (outside the"
        " engine's batch); above 1: slower than the profile",
        *_REPLICA,
        "term",
    ),
    "headway_replicas_failed": _gauge("Wanted replicas that fail to start", "pool"),
    "headway_requests_held": _gauge("Requests held in the gateway", "model"),
    "headway_tenant_requests_held": _gauge("Requests held in the gateway, by tenant", "tenant"),
    "headway_batch_requests_open": _gauge("Batch requests that are held or at an engine"),
    # Keys and tenants.
    "headway_tenant_requests_total": _counter(
        "Requests that have ended, by the tenant of their key", "model", "tenant"
    ),
    "headway_tenant_tokens_total": _counter("Prompt and output tokens of these requests", "model", "tenant"),
    "headway_key_requests_total": _counter("Requests that have ended, by key", "key"),
    "headway_key_tokens_total": _counter("Prompt and output tokens of these requests", "key"),
    "headway_key_refusals_total": _counter("Requests that were answered 429, by key and reason", "key", "reason"),
    "headway_key_store_up": _gauge("Whether the last exchange with the key store succeeded"),
    "headway_key_store_errors_total": _counter("Exchanges with the key store that failed"),
    # The fleet file.
    "headway_reloads_total": _counter("Reloads of the fleet file", "outcome"),
    "headway_reload_failed": _gauge("Whether the fleet file could not be reloaded the last time"),
    # A shadow candidate, whose decisions have no effect.
    "headway_shadow_decisions_total": _counter(
        "Decisions of the candidate of --shadow: agreed with the real ones, differed, or failed",
        "model",
        "kind",
        "result",
    ),
    "headway_shadow_agreement": _gauge(
        "Share of the decisions of the candidate of --shadow that are the same as the real ones", "model", "kind"
    ),
    "headway_shadow_gain": _gauge(
        "What the candidate of --shadow gains over the fleet in the last rehearsal of both: SLO attainment, or dollars"
        " an hour that it saves; mean, low and high",
        "quantity",
        "bound",
    ),
    # The autopilot.
    "headway_autopilot_stage": _gauge(
        "1 for the stage of the autopilot's change, the present or the last one: idle, staged, judged, promoted, rolled"
        " back",
        "stage",
    ),
    "headway_autopilot_stopped": _gauge("Whether the autopilot's kill switch is on"),
    "headway_autopilot_changes": _gauge("Changes that the autopilot has tried, among the last 20", "outcome"),
    "headway_autopilot_pairs": _gauge("Pairs of periods with and without the autopilot's present or last change"),
    "headway_autopilot_gain": _gauge("SLO attainment that its change adds, the mean over these pairs"),
    "headway_autopilot_saved": _gauge("Share of the dollars that its change saves, the mean over these pairs"),
    # Several gateways.
    "headway_peers": _gauge("Other gateways whose state counts"),
    "headway_peer_leads": _gauge("Whether this gateway is the one that scales"),
    "headway_peer_messages_total": _counter("Messages to and from other gateways", "way"),
    "headway_peer_requests_in_flight": _gauge(
        "Requests of other gateways at a replica, as last reported", "replica", "pool"
    ),
    "headway_peer_store_up": _gauge("Whether the store that the gateways share can be used"),
    "headway_peer_store_errors_total": _counter("Times that the store could not be used"),
    # KV cache events.
    "headway_kv_events_live": _gauge("Whether a replica's KV cache events are read, and none are missing", *_EVENTS),
    "headway_kv_events_cached_blocks": _gauge(
        "KV blocks that a replica's prefix cache holds, as far as is known", *_EVENTS
    ),
    "headway_kv_events_blocks_total": _counter("KV blocks that were stored or removed, by replica", *_EVENTS),
    "headway_kv_events_ignored_total": _counter("KV blocks of events that make no sense", *_EVENTS),
    "headway_kv_events_gaps_total": _counter("Times that batches of events were missing", *_EVENTS),
    "headway_kv_events_lost_total": _counter("Batches of events that no replay had, either", *_EVENTS),
    "headway_kv_events_malformed_total": _counter("Batches of events that could not be read", *_EVENTS),
    "headway_kv_events_restarts_total": _counter(
        "Times that the index of a replica's prefix cache was built anew", *_EVENTS
    ),
    "headway_kv_events_ranks": _gauge("Data-parallel ranks of a replica whose events are read", *_EVENTS),
    "headway_kv_events_compared_total": _counter(
        "Answers whose cached tokens, by the engine's count, were compared", *_EVENTS
    ),
    "headway_kv_events_expected_tokens_total": _counter(
        "Cached tokens that the events let expect, of these answers", *_EVENTS
    ),
    "headway_kv_events_reported_tokens_total": _counter("Cached tokens that these answers report", *_EVENTS),
    "headway_kv_events_agreement": _gauge(
        "Of the last answers, the part of the larger of both counts that the smaller one is", *_EVENTS
    ),
    # The process.
    "headway_build_info": _gauge(
        "1; the versions of Headway and Python, and whether Headway is compiled", "version", "python", "compiled"
    ),
    "headway_loop_delay_seconds": _gauge(
        "By how much the gateway, or a worker, ran late what was due: the longest delay of the last minute"
    ),
    "process_cpu_seconds_total": _counter("CPU time of the process that answers, user and system"),
    "process_resident_memory_bytes": _gauge("Its resident memory"),
    "process_virtual_memory_bytes": _gauge("Its virtual memory"),
    "process_start_time_seconds": _gauge("Its start, in seconds since 1970"),
    "process_open_fds": _gauge("Its open file descriptors"),
    "process_max_fds": _gauge("The most that it may have"),
}
"""All metrics, in the order of the documentation."""
EXEMPLARS = (
    "headway_time_to_first_token_seconds",
    "headway_time_per_output_token_seconds",
    "headway_request_duration_seconds",
    "headway_hold_seconds",
)
"""Histograms with exemplars, for scrapers that request OpenMetrics."""
