"""The fleets of K-tier Llumnix as scenarios, and the measurements of a run.

One fleet serves all systems (section 4.4): four replicas, with the catalog's memory, sequences and step times. The
paper gives neither model nor GPU nor the number of sequences. Llama-2-7B on one A100 each is Vidur's default. The
catalog's 256 sequences reproduce the paper's only absolute latencies (K=1 takes 10 to 12 s). The authors' public
scripts use 64. The paper's schedulers differ in how a replica forms its batches and in their policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headway.metrics.columns import Floats, Ints
from headway.metrics.latency import distribution, sample
from headway.metrics.tokens import inter_token_gaps
from headway.report.run import Run

SEATS = 256
"""Sequences that a replica runs at once, from the catalog."""
FRACTIONS = tuple(np.round(np.linspace(0.0, 1.0, 41), 3).tolist())
"""Fractions of the quantiles that are stored for charts."""

VLLM = {"batching": "prefill-first", "watermark": 0.01}
ORCA = {"batching": "prefill-first"}
"""Orca's batching in the catalog: whole prompts in separate iterations, started at once."""
SARATHI = {"batching": "chunked", "max_num_batched_tokens": 512, "watermark": 0.01}
LLUMLET = {"batching": "whole-prompt"}
"""The paper's Llumlet packs prompts and decodes into one batch."""
ALL_SEATS = LLUMLET | {"max_num_seqs": 8192}
"""Batch slots for all requests, with the GPU's KV cache."""
UNBOUNDED = ALL_SEATS | {"kv_dtype_bytes": 0.25}
"""Batch slots and KV cache for all requests: an eighth of the bytes per token."""


def ktier_policies(num_tiers: int, seats: int = SEATS, **arguments: Any) -> dict[str, Any]:
    """The paper's system: urgent requests first, to the freest replica, with migration (sections 3.3 to 3.5).

    Requests wait in front of the fleet, in one queue by tier and arrival (section 3.4), until a replica has a batch
    slot.
    """
    headroom = {"num_tiers": num_tiers, **arguments}
    return {
        "routing": {"name": "freest", **headroom},
        "ordering": {"name": "priority", "preemptive": False},
        "ordering_at": "both",
        "window": seats,
        "migration": {"name": "llumnix", **headroom},
    }


def at_once(num_tiers: int, interval_s: float = 0.05) -> dict[str, Any]:
    """The system, except that every request goes to a replica on arrival and waits there: section 3.4 read literally.

    `interval_s`: time between two migrations.
    """
    policies = ktier_policies(num_tiers) | {"ordering_at": "replica", "window": None}
    return policies | {"migration": policies["migration"] | {"interval_s": interval_s}}


def queue_only(num_tiers: int) -> dict[str, Any]:
    """Only the queue by tiers: requests go to the least loaded replica, without headroom and migration."""
    policies = ktier_policies(num_tiers) | {"routing": "least-loaded"}
    del policies["migration"]
    return policies


INFAAS = {"routing": "infaas", "ordering": "fcfs"}
ROUND_ROBIN = {"routing": "round-robin", "ordering": "fcfs"}


def scenario(
    policies: Mapping[str, Any],
    engine: Mapping[str, Any],
    num_requests: int,
    *,
    mix: str = "uniform",
    num_tiers: int = 1,
    rate: float = 1250.0,
    quick: bool = False,
    **pool: Any,
) -> dict[str, Any]:
    """The scenario document. `quick`: half the fleet, half the requests, half the rate."""
    half = 2 if quick else 1
    return {
        "workload": {
            "builtin": "ktier",
            "num_requests": num_requests // half,
            "arrivals": {"kind": "poisson", "rate": rate / half},
            "tiers": {"mix": mix, "num_tiers": num_tiers},
        },
        "fleet": [
            {
                "model": "llama-2-7b",
                "gpu": "a100-80gb",
                "replicas": 4 // half,
                "engine": {"name": "simulated-0.15", "max_num_seqs": SEATS, **engine},
                **pool,
            }
        ],
        "policies": dict(policies),
    }


def measure(run: Run) -> dict[str, Any]:
    """Latencies over all requests and by tier. Prefill is the time to the first token, decode the rest."""
    chosen = sample(run.records, 0.0, None)
    tier: Ints = run.records.workload["tier"][chosen.id].astype(np.int64)
    latencies = {"prefill": chosen.ttft_s, "e2e": chosen.e2e_s, "decode": chosen.e2e_s - chosen.ttft_s}
    measured: dict[str, Any] = {
        "moves": int(chosen.column("moves").sum()),
        "preemptions": int(chosen.column("preemptions").sum()),
    }
    measured |= {name: _numbers(values_s) for name, values_s in latencies.items()}
    measured["finished"] = bool(chosen.finished.all())
    measured["end_s"] = run.records.end_s
    measured["tiers"] = {
        str(each): {name: _numbers(values_s[tier == each]) for name, values_s in latencies.items()}
        for each in np.unique(tier).tolist()
    }
    return measured


def measure_curves(run: Run) -> dict[str, Any]:
    """Like `measure`, with the distributions by tier for Figures 5, 8 and 9."""
    measured = measure(run)
    chosen = sample(run.records, 0.0, None)
    tiers: Ints = run.records.workload["tier"].astype(np.int64)
    tier = tiers[chosen.id]
    gaps = inter_token_gaps(run.records, tiers)
    measured["curves"] = {
        str(each): {
            "ttft": np.quantile(chosen.ttft_s[tier == each], FRACTIONS).tolist(),
            "tbt": gaps[each].curve_s(np.asarray(FRACTIONS)).tolist(),
            "e2e": np.quantile(chosen.e2e_s[tier == each], FRACTIONS).tolist(),
        }
        for each in np.unique(tier).tolist()
    }
    return measured


def _numbers(values_s: Floats) -> dict[str, float] | None:
    percentiles = distribution(values_s)
    if percentiles is None:
        return None
    return {"mean": percentiles.mean, "p50": percentiles.p50, "p90": percentiles.p90, "p99": percentiles.p99}
