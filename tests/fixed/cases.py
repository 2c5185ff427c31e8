"""The fixed cases: input files, and the commands that are run on them.

Cases are small, so that all of them take less than a minute. Planner cases are small enough that the solver proves the
optimum within its time limit: a search that the limit ends may find another answer next time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

JSON = "--json --no-progress"


@dataclass(frozen=True)
class Case:
    """One case."""

    name: str
    commands: tuple[str, ...]
    """Arguments of `headway`, separated by spaces. They run in the folder with the files."""
    files: dict[str, Any] = field(default_factory=dict)
    """Input files: a text, or a document that is written as YAML."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes other than 0: index of the command -> code."""


CASES: dict[str, Case] = {}


def case(name: str, *commands: str, files: dict[str, Any] | None = None, codes: dict[int, int] | None = None) -> None:
    """Adds a case."""
    assert name not in CASES
    CASES[name] = Case(name, commands, files or {}, codes or {})


def simulated(name: str, document: dict[str, Any], *options: str) -> None:
    """Adds a case of one scenario: simulated with records and decisions, once for each of the options."""
    commands = [
        f"simulate scenario.yaml --out out{i} --decisions decisions{i}.jsonl {JSON} {option}".strip()
        for i, option in enumerate(options or [""])
    ]
    case(name, *commands, files={"scenario.yaml": {"name": name, **document}})


def compared(name: str, document: dict[str, Any], option: str = "") -> None:
    """Adds a case of one scenario whose variants are compared."""
    command = f"compare scenario.yaml --seeds 1 --out out {JSON} {option}".strip()
    case(name, command, files={"scenario.yaml": {"name": name, **document}})


def lognormal(mean: float, cv: float = 1.0, most: int = 4000) -> dict[str, Any]:
    """A distribution of lengths."""
    return {"kind": "lognormal", "mean": mean, "cv": cv, "min": 2, "max": most}


def pool(**changes: Any) -> dict[str, Any]:
    """A pool of replicas of a small model."""
    return {"model": "llama-3.1-8b", "gpu": "l40s", "engine": "vllm-0.15", **changes}


TIERS = [
    {"tier": 0, "share": 0.3, "ttft_s": 1.0, "tpot_s": 0.05, "deadline_after_s": 8},
    {"tier": 1, "share": 0.4, "ttft_s": 5.0, "tpot_s": 0.1, "e2e_s": 60},
    {"tier": 2, "share": 0.3, "deadline_after_s": 200},
]
REASONING = {
    "num_requests": 75,
    "arrivals": {"kind": "gamma", "rate": 6, "cv": 1.5},
    "prompt_tokens": lognormal(200),
    "reasoning_tokens": lognormal(500, most=2000),
    "output_tokens": lognormal(200),
    "correlation": 0.4,
    "tiers": TIERS,
}
CHAT = {
    "num_requests": 150,
    "arrivals": 12,
    "prompt_tokens": lognormal(600),
    "output_tokens": lognormal(150),
    "tiers": TIERS,
}
SIMULATED = {"name": "simulated-0.15", "max_num_seqs": 32}
TIGHT = {"kv_capacity_tokens": 9000, "engine": SIMULATED}
SWAP = {**SIMULATED, "preemption": "swap", "host_memory_bytes": 2e9}

# The scenarios that come with Headway.

case(
    "preset-chat",
    "compare --seeds 1 --builtin chat --num-requests 200 --warmup-s 1 --routing round-robin,jsq-tokens,least-kv "
    f"--ordering fcfs,priority --out out {JSON}",
    "simulate --builtin chat --num-requests 200 --warmup-s 1 --routing power-of-two --ordering fcfs --no-progress "
    "--trace-out trace.json",
    "compare --seeds 1 --builtin chat --num-requests 100 --warmup-s 0 --no-progress",
)
case("preset-pascal", f"compare --seeds 1 --builtin pascal --num-requests 120 --out out {JSON}")
case("preset-ktier", f"compare --seeds 1 --builtin ktier --num-requests 500 --out out {JSON}")
case("preset-cauchy", f"compare --seeds 1 --builtin cauchy --num-requests 150 --out out {JSON}")
case(
    "preset-cascadia",
    f"simulate --builtin cascadia --num-requests 150 --out out --decisions decisions.jsonl {JSON}",
)
for variant in ("headway", "least loaded", "by load", "by load and queue"):
    case(
        f"preset-headway-{variant.replace(' ', '-')}",
        f"simulate --builtin headway --num-requests 600 --variant '{variant}' --out out --decisions decisions.jsonl "
        f"{JSON}",
    )
for variant in ("LT-UA",):
    case(
        f"preset-sageserve-{variant.lower()}",
        f"simulate --builtin sageserve --num-requests 1200 --until-s 4000 --warmup-s 100 --variant {variant} "
        f"--out out {JSON}",
    )

# Policies.

simulated(
    "engine-batching",
    {
        "workload": CHAT,
        "fleet": [
            pool(name="chunked", engine={"name": "vllm-0.15", "max_num_batched_tokens": 512, "schedule_lag": 1}),
            pool(name="whole", engine={"name": "simulated-0.15", "batching": "whole-prompt", "max_num_seqs": 8}),
            pool(name="first", engine={"name": "vllm-v0", "max_num_seqs": 16}, gpu="a100-80gb"),
            pool(name="request", engine={"name": "fastertransformer", "max_num_seqs": 8}, gpu="h100-80gb-sxm"),
            pool(name="sglang", engine="sglang", gpu="h20-96gb"),
        ],
        "policies": {"routing": "round-robin"},
    },
    "--step stretch",
    "--step exact",
)
ROUTERS = [
    "headway", "round-robin", "random", "least-loaded", "jsq-tokens", "jsq-tokens-oracle", "power-of-two", "least-kv",
    "least-footprint", "freest", "infaas", "prefix-affinity", "session-affinity", "pascal", "cauchy", "sageserve",
]  # fmt: skip
ORDERINGS = [
    "fcfs",
    {"name": "round-robin", "quantum_tokens": 100},
    {"name": "fewest-quanta", "quantum_tokens": 100},
    "priority",
    {"name": "edf", "preemptive": True},
    "priority-first",
    "deadline-priority",
    "shortest-remaining",
    "shortest-to-answer",
    {"name": "pascal", "quantum_tokens": 100, "demotion_tokens": 900},
    {"name": "tier-promotion", "quota_s": [5, 3, 2]},
    {"name": "tiers-and-phases", "num_tiers": 3, "quantum_tokens": 100, "by_quanta": True},
]


def variants(kind: str, choices: list[Any], **other: Any) -> list[dict[str, Any]]:
    """A variant for each choice of a kind of policy."""
    return [{"name": f"{kind}-{i}", kind: each, **other} for i, each in enumerate(choices)]


compared(
    "routing-every",
    {
        "workload": {
            "builtin": "chat-sessions",
            "num_requests": 120,
            "arrivals": 6,
            "sessions": {"turns": {"kind": "geometric", "mean": 3}, "think_s": 2},
            "tiers": TIERS,
        },
        "fleet": [pool(name="slow", replicas=3, kv_capacity_tokens=30_000), pool(name="fast", gpu="h100-80gb-sxm")],
        "policies": {"routing": ROUTERS},
    },
)
simulated(
    "routing-stale-metrics",
    {
        "workload": CHAT,
        "fleet": [pool(replicas=4, engine={"name": "vllm-0.15", "max_num_waiting": 8}, kv_capacity_tokens=12_000)],
        "observe": {"period_s": 1.0, "delay_s": 0.3, "loss": 0.2},
        "policies": {"routing": {"name": "infaas", "overload_share": 0.02}},
    },
    "",
    "--routing least-kv",
    "--routing power-of-two --seed 3",
)
compared(
    "ordering-every-recompute",
    {
        "workload": REASONING,
        "fleet": [pool(replicas=2, **TIGHT)],
        "policies": {"ordering": ORDERINGS},
        "pacer": {"ttfat_s": 0.5, "tpot_s": 0.05},
    },
)
compared(
    "ordering-every-gateway",
    {
        "workload": REASONING,
        "fleet": [pool(replicas=2, **TIGHT)],
        "policies": {"ordering": ORDERINGS, "ordering_at": "both", "window": 10},
    },
)
simulated(
    "ordering-gateway-only",
    {
        "workload": {**REASONING, "timeout_s": 25},
        "fleet": [pool(replicas=2, **TIGHT)],
        "policies": {"ordering": "edf", "ordering_at": "gateway", "routing": "least-kv"},
    },
)
compared(
    "preemption-swap",
    {
        "workload": {**REASONING, "num_requests": 60},
        "fleet": [pool(replicas=2, kv_capacity_tokens=7000, engine=SWAP)],
        "policies": {"ordering": ORDERINGS},
    },
)
simulated(
    "preemption-exact",
    {
        "workload": {**REASONING, "num_requests": 40},
        "fleet": [
            pool(kv_capacity_tokens=6000, engine={**SWAP, "host_memory_bytes": 3e8}),
            pool(kv_capacity_tokens=6000, engine=SIMULATED),
        ],
        "policies": {"ordering": {"name": "priority", "preemptive": True}},
    },
    "--step stretch",
    "--step exact",
)
simulated(
    "parallel-shapes-and-models",
    {
        "workload": {**CHAT, "arrivals": 6, "models": {"deepseek-v3": 1, "llama-3.1-70b": 2, "qwen3-30b-a3b": 1}},
        "fleet": [
            {"model": "deepseek-v3", "gpu": "h200-141gb-sxm", "tp": 1, "ep": True, "dp": 8, "engine": "sglang"},
            {"model": "llama-3.1-70b", "gpu": "a100-80gb", "tp": 2, "pp": 2, "engine": "vllm-v0", "replicas": 2},
            {"model": "qwen3-30b-a3b", "gpu": "h100-80gb-sxm", "tp": 2, "usd_per_gpu_hour": 1.5, "engine": "orca"},
        ],
        "slo": {"ttft_s": 2, "tpot_s": 0.05, "e2e_s": 30},
    },
)
simulated(
    "prefix-cache-and-offload",
    {
        "workload": {
            "num_requests": 150,
            "arrivals": 2,
            "prompt_tokens": lognormal(300),
            "output_tokens": lognormal(100),
            "prefixes": {
                "num_groups": 6,
                "prefix_tokens": {"kind": "uniform", "min": 200, "max": 3000},
                "share": 0.8,
                "skew": 1.0,
            },
            "sessions": {"turns": {"kind": "geometric", "mean": 4}, "think_s": 5, "think_cv": 0.5},
        },
        "fleet": [
            pool(
                replicas=2,
                kv_capacity_tokens=15_000,
                engine={"name": "vllm-0.15", "prefix_caching": True, "kv_offload_bytes": 4e9},
            ),
            pool(gpu="a100-80gb", kv_capacity_tokens=12_000, engine={"name": "sglang", "prefix_caching": True}),
        ],
        "policies": {"routing": {"name": "prefix-affinity", "num_segments": 1}},
    },
    "",
    "--routing session-affinity --step exact",
)
simulated(
    "closed-loop",
    {
        "workload": {**CHAT, "concurrency": 24, "think_s": 0.7, "timeout_s": 20},
        "fleet": [pool(replicas=2, **TIGHT)],
        "policies": {"routing": "jsq-tokens"},
        "simulation": {"warmup_s": 5, "until_s": 60},
    },
    "",
    "--concurrency 8 --step exact",
)
simulated(
    "timeouts-and-rejections",
    {
        "workload": {
            **CHAT,
            "arrivals": {
                "kind": "bursts",
                "rate": 5,
                "bursts": [{"from_s": 3, "to_s": 5, "factor": 12}],
                "repeat_s": 8,
            },
            "timeout_s": 12,
            "tiers": [{"tier": 0, "timeout_s": 1.5}, {"tier": 1, "share": 2, "ttft_s": 3}],
        },
        "fleet": [pool(replicas=2, kv_capacity_tokens=6000, engine={**SIMULATED, "max_num_waiting": 6})],
        "policies": {"ordering": "priority", "routing": "round-robin"},
    },
    "",
    "--ordering-at gateway --window 6",
)
simulated(
    "faults-crash",
    {
        "workload": CHAT,
        "fleet": [pool(replicas=3)],
        "faults": [
            {"at_s": 3, "replica": 0, "down_s": 4},
            {"at_s": 5, "replica": 1},
            {"at_s": 5.5, "replica": 2, "down_s": 1},
        ],
        "policies": {"routing": "random"},
    },
    "",
    "--step exact",
)

# Migration and scaling.

simulated(
    "migration-llumnix-drains",
    {
        "workload": {**CHAT, "num_requests": 250, "output_tokens": lognormal(300)},
        "fleet": [pool(name="main", replicas=3, max_replicas=6, start_s=4, kv_capacity_tokens=25_000)],
        "policies": {
            "routing": {"name": "freest", "num_tiers": 3, "decay": "auto", "adaptive": True},
            "ordering": {"name": "priority", "preemptive": False},
            "migration": {"name": "llumnix", "num_tiers": 3},
            "scaling": {
                "name": "timetable",
                "counts": {"main": [3, 5, 2, 4, 1]},
                "step_s": 6,
                "ahead_s": 2,
                "interval_s": 1,
            },
        },
    },
    "",
    "--step exact",
)
simulated(
    "migration-pascal-phases",
    {
        "workload": REASONING,
        "fleet": [pool(replicas=3, kv_capacity_tokens=6000, engine=SWAP)],
        "policies": {
            "routing": "pascal",
            "ordering": {"name": "pascal", "quantum_tokens": 100, "by_quanta": True},
            "migration": {"name": "pascal", "host_counts": True, "quantum_tokens": 100},
        },
    },
    "",
    "--step exact",
)
simulated(
    "migration-headway-scaling-freeness",
    {
        "workload": {**REASONING, "num_requests": 140},
        "fleet": [pool(replicas=2, max_replicas=5, start_s=3, **TIGHT)],
        "faults": [{"at_s": 12, "replica": 0, "down_s": 3}],
        "policies": {
            "routing": "headway",
            "ordering": "tiers-and-phases",
            "migration": "headway",
            "scaling": {"name": "freeness", "normalised": True, "cooldown_s": 3},
        },
    },
)
SCALED = {
    "workload": {
        **CHAT,
        "num_requests": 250,
        "arrivals": {"kind": "curve", "step_s": 10, "rates": [4, 10, 14, 3, 3]},
        "slo": {"ttft_s": 4},
        "tiers": None,
    },
    "fleet": [
        pool(name="cheap", replicas=1, max_replicas=4, start_s=5, kv_capacity_tokens=10_000),
        pool(name="fast", gpu="a100-80gb", replicas=1, max_replicas=3, start_s=5, kv_capacity_tokens=10_000),
    ],
    "gpu_limits": [{"gpu": "l40s", "count": 3}, {"gpu": "a100-80gb", "count": 3}],
}
simulated(
    "scaling-reactive-clairvoyant",
    {**SCALED, "policies": {"scaling": {"name": "reactive", "cooldown_s": 4, "interval_s": 1}}},
    "--clairvoyant",
)
compared(
    "scaling-short-term",
    {
        **SCALED,
        "variants": variants(
            "scaling",
            [
                {"name": "target-utilization", "in_flight": 12, "stabilization_s": 10, "interval_s": 2},
                {"name": "freeness", "out_below": 5, "in_above": 200, "cooldown_s": 3},
                {"name": "reactive", "pending_guard": False, "cooldown_s": 3},
                {"name": "timetable", "counts": {"cheap": [1, 3, 1]}, "step_s": 15},
            ],
        ),
    },
    "--clairvoyant",
)
REGIONS = ("us-east", "us-central", "us-west")
DAY = {
    "workload": {
        "builtin": "sageserve-july-2025",
        "models": {"llama-2-70b": 1},
        "start_hour": 58,
        "duration_s": 3000,
        "scale": 0.06,
        "surges": [{"from_s": 1200, "to_s": 1500, "factor": 3}],
    },
    "fleet": [
        {
            "name": region,
            "model": "llama-2-70b",
            "gpu": "a100-80gb",
            "tp": 4,
            "kv_capacity_tokens": 14_000,
            "engine": "simulated-0.15",
            "replicas": 3,
            "min_replicas": 2,
            "max_replicas": 6,
            "region": region,
        }
        for region in REGIONS
    ],
    "network": {"inter_region_s": 0.05, "pairs": [["us-east", "us-west", 0.08]], "p90_to_median": 4},
    "provisioning": {"reclaim_s": 60, "reclaim_max_s": 200, "redeploy_s": 300, "acquire_s": 400, "remote_s": 900},
    "gpu_limits": [{"region": region, "gpu": "a100-80gb", "count": 20} for region in REGIONS],
    "simulation": {"until_s": 3000},
}
REGIONAL = {"routing": "sageserve", "admission": "queue-manager", "ordering": {"name": "priority-first"}}


def long_term(name: str, method: str, planner: str, **more: Any) -> dict[str, Any]:
    """A long-term scaler."""
    return {
        "name": name,
        "plan": {"step_s": 900, "period_s": 900, "tps": {"llama-2-70b": 120.0}},
        "forecaster": {"name": method, "past_hours": 48},
        "planner": planner,
        **more,
    }


compared(
    "scaling-long-term",
    {
        **DAY,
        "policies": REGIONAL,
        "variants": variants(
            "scaling",
            [
                long_term("lt-i", "seasonal-naive", "ilp"),
                long_term("lt-u", "last-value", "greedy"),
                long_term("lt-ua", "arima:1-0-1-leak", "ilp", last_s=400, burst=1.5),
                long_term("lt-i", "ets", "greedy"),
            ],
        ),
    },
)
simulated(
    "scaling-profiled-replicas",
    {
        **DAY,
        "workload": {**DAY["workload"], "duration_s": 1200, "scale": 0.03},
        "policies": {**REGIONAL, "scaling": {"name": "lt-i", "plan": {"step_s": 300, "period_s": 600}}},
        "simulation": {"until_s": 1200},
    },
)
TWO_MODELS = [
    {
        "name": f"{model}-{region}-{kind}",
        "model": model,
        "gpu": "a100-80gb",
        "region": region,
        "replicas": 2,
        "engine": "simulated-0.15",
        "max_replicas": 4,
        "min_replicas": 1,
        "kv_capacity_tokens": 16_000,
        "start_s": 30,
    }
    for model in ("llama-3.1-8b", "llama-3.2-3b")
    for region in ("us-east", "us-west")
    for kind in ("interactive", "mixed", "batch")
]
simulated(
    "scaling-chiron-spot",
    {
        "workload": {
            "builtin": "sageserve-nov-2024",
            "models": {"llama-3.1-8b": 1, "llama-3.2-3b": 1},
            "regions": {"us-east": 1, "us-west": 1},
            "start_hour": 37,
            "duration_s": 900,
            "scale": 0.8,
        },
        "fleet": TWO_MODELS,
        "provisioning": {"reclaim_s": 10, "redeploy_s": 40, "acquire_s": 90},
        "gpu_limits": [{"region": region, "gpu": "a100-80gb", "count": 18} for region in ("us-east", "us-west")],
        "network": {"inter_region_s": 0.1},
        "policies": {
            "routing": {"name": "sageserve", "interactive_suffix": "-interactive", "batch_suffix": "-batch"},
            "ordering": {"name": "deadline-priority", "batch_tier": 2},
            "admission": {"name": "queue-manager", "urgent_after_s": 200, "interactive_suffix": "-interactive"},
            "scaling": {"name": "chiron", "theta": 0.3, "batch_deadline_s": 300},
        },
        "simulation": {"until_s": 1500},
    },
)

# Combos of prefill and decode replicas.

HANDOVER = {"mode": "layerwise", "degree": 4, "stream_bytes_per_s": 0.43e9, "stream_overhead_s": 0.0067}


def combo(name: str = "pair", num: tuple[int, int] = (1, 1), handover: Any = None, **more: Any) -> dict[str, Any]:
    """A combo with so many prefill and decode replicas."""
    side = {"model": "llama-3.1-8b", "engine": "vllm-0.15"}
    return {
        "name": name,
        "prefill": {**side, "gpu": "h800-80gb-sxm", "replicas": num[0]},
        "decode": {**side, "gpu": "h20-96gb", "replicas": num[1]},
        "handover": handover or HANDOVER,
        **more,
    }


MIXED = {"name": "mixed", "aggregated": pool(), "goodput_rps": 5}
simulated(
    "combos-handover-faults-roles",
    {
        "workload": {**CHAT, "num_requests": 250, "arrivals": 25},
        "combos": [combo(num=(2, 2), goodput_rps=20), MIXED],
        "faults": [
            {"at_s": 2, "replica": 0, "streams": 2, "down_s": 0.5},
            {"at_s": 4, "replica": 1, "streams": 3},
            {"at_s": 6, "replica": 2, "down_s": 2},
        ],
        "roles": [
            {"at_s": 5, "replica": 1, "role": "decode", "switch_s": 0.5},
            {"at_s": 8, "replica": 1, "role": "mixed"},
        ],
        "policies": {"routing": {"name": "cauchy", "within": "strict"}},
    },
    "",
    "--step exact",
    "--routing headway",
)
HANDOVERS = [
    {"mode": "bulk"},
    {"mode": "bulk", "degree": 2, "stream_bytes_per_s": 1e9, "first_token": "decode", "landing": "host"},
    {"mode": "layerwise", "degree": 8, "stream_bytes_per_s": 0.4e9, "first_token": "sent"},
]
simulated(
    "combos-handover-modes",
    {
        "workload": {**CHAT, "arrivals": 20},
        "combos": [
            combo(f"pair-{i}", handover=each, replicas=1 + i % 2, goodput_rps=8) for i, each in enumerate(HANDOVERS)
        ],
        "policies": {
            "routing": {
                "name": "cauchy",
                "between": "round-robin",
                "within": "strict",
                "classes": [{"combos": ["pair-0"], "max_prompt_tokens": 200}],
            }
        },
    },
    "",
    "--routing cauchy --seed 2",
)
simulated(
    "combos-scaling",
    {
        "workload": {
            **CHAT,
            "num_requests": 900,
            "arrivals": {"kind": "curve", "step_s": 20, "rates": [5, 40, 8]},
            "tiers": None,
        },
        "combos": [
            combo("pair", goodput_rps=12, max_replicas=3),
            {**MIXED, "replicas": 1, "min_replicas": 0, "max_replicas": 4},
        ],
        "gpu_limits": [{"gpu": "h800-80gb-sxm", "count": 3}, {"gpu": "h20-96gb", "count": 2}],
        "policies": {
            "routing": "cauchy",
            "scaling": {"name": "combos", "local_window_s": 6, "global_window_s": 25, "grace_s": 3, "interval_s": 1},
        },
    },
    "",
    "--scaling target-utilization",
)

# Cascades.

SMALL, LARGE = "deepseek-r1-distill-qwen-7b", "deepseek-r1-distill-llama-70b"
H100 = {"gpu": "h100-80gb-sxm", "engine": "sglang"}
CASCADE = {
    "workload": {
        "quality": {"trace": 1, "models": [SMALL, LARGE], "num_requests": 200, "reasoning_share": 0.5},
        "arrivals": 6,
        "num_requests": 200,
        "tiers": [{"tier": 0, "e2e_s": 12}, {"tier": 1, "deadline_after_s": 60}],
    },
    "fleet": [
        {"name": "small", "model": SMALL, **H100},
        {"name": "large", "model": LARGE, "tp": 2, "replicas": 2, **H100},
    ],
    "cascade": {"models": [SMALL, LARGE], "judge_s": 0.3, "judge_usd": 0.001, "judge_bias": -2, "judge_noise": 5},
}
CASCADES = [
    {"name": "thresholds", "thresholds": [70]},
    {"name": "load-based", "threshold": 80, "lowest": 30, "calm": 0.02, "full": 0.1},
    {"name": "pre-routed", "threshold": 75, "noise": 10},
    {"name": "deadline-aware", "thresholds": 85},
]
case(
    "cascade-every-policy",
    *(
        f"simulate {each['name']}.yaml --out {each['name']} --decisions {each['name']}.jsonl {JSON}"
        for each in CASCADES
    ),
    files={f"{each['name']}.yaml": {**CASCADE, "cascade": {**CASCADE["cascade"], "policy": each}} for each in CASCADES},
)
simulated(
    "cascade-replan",
    {
        "workload": {
            "quality": {"trace": 3, "models": [SMALL, LARGE], "num_requests": 150},
            "arrivals": {"kind": "curve", "step_s": 90, "rates": [2, 6]},
            "duration_s": 180,
        },
        "fleet": [
            {"name": "small", "model": SMALL, "replicas": 2, **H100},
            {"name": "large", "model": LARGE, "tp": 2, "replicas": 2, **H100},
        ],
        "cascade": {
            "models": [SMALL, LARGE],
            "policy": {"name": "thresholds", "thresholds": 60},
            "replan": {
                "quality": 75,
                "every_s": 30,
                "audit_share": 0.3,
                "least_audited": 15,
                "sample": 20,
                "num_gpus": 6,
                "planning_s": 5,
            },
        },
    },
)
SMALL_SIDE = {"model": SMALL, "engine": "vllm-0.15"}
simulated(
    "cascade-on-combos",
    {
        **CASCADE,
        "combos": [
            {
                "name": "small",
                "prefill": {**SMALL_SIDE, "gpu": "l40s"},
                "decode": {**SMALL_SIDE, "gpu": "a100-80gb"},
                "handover": HANDOVER,
                "replicas": 2,
            }
        ],
        "fleet": CASCADE["fleet"][1:],
        "policies": {"routing": "headway"},
    },
)
EVERYTHING = {
    "workload": {
        "quality": {"trace": 1, "models": [SMALL, LARGE], "reasoning_share": 0.6, "num_requests": 200},
        "arrivals": {"kind": "curve", "step_s": 25, "rates": [2, 5, 12, 5, 1, 1]},
        "duration_s": 150,
        "regions": {"us-east": 2, "eu-west": 1},
        "tiers": [{"tier": 0, "share": 2, "e2e_s": 45}, {"tier": 1, "share": 5, "e2e_s": 90}, {"tier": 2, "share": 3}],
    },
    "combos": [
        {
            "name": "us-small",
            "prefill": {**SMALL_SIDE, "gpu": "l40s", "region": "us-east", "kv_capacity_tokens": 20_000},
            "decode": {**SMALL_SIDE, "gpu": "a100-80gb", "region": "us-east", "kv_capacity_tokens": 20_000},
            "max_replicas": 4,
            "handover": HANDOVER,
        },
        {
            "name": "eu-small",
            "aggregated": {**SMALL_SIDE, "gpu": "l40s", "region": "eu-west", "kv_capacity_tokens": 20_000},
            "max_replicas": 4,
        },
    ],
    "fleet": [
        {
            "name": f"{region}-large",
            "model": LARGE,
            "gpu": "a100-80gb",
            "tp": 4,
            "region": region,
            "kv_capacity_tokens": 16_000,
            "engine": "vllm-0.15",
            "max_replicas": 3,
        }
        for region in ("us-east", "eu-west")
    ],
    "gpu_limits": [
        {"region": "us-east", "gpu": "a100-80gb", "count": 16},
        {"region": "us-east", "gpu": "l40s", "count": 4},
        {"region": "eu-west", "gpu": "a100-80gb", "count": 12},
        {"region": "eu-west", "gpu": "l40s", "count": 3},
    ],
    "cascade": {"models": [SMALL, LARGE], "policy": {"name": "thresholds", "thresholds": [60]}},
    "network": {"inter_region_s": 0.05},
    "provisioning": {"reclaim_s": 3, "redeploy_s": 10, "acquire_s": 6},
    "pacer": {"ttfat_s": 0.5, "tpot_s": 0.05},
    "policies": {"ordering_at": "gateway"},
}
EVERY_POLICY = {
    "routing": "headway",
    "ordering": "tiers-and-phases",
    "migration": "headway",
    "admission": {"name": "queue-manager", "threshold": 0.3, "low_threshold": 0.1},
}
compared(
    "everything-at-once",
    {
        **EVERYTHING,
        "variants": [
            *variants(
                "scaling",
                [
                    {
                        "name": "lt-i",
                        "plan": {
                            "step_s": 5,
                            "period_s": 25,
                            "startup_s": 6,
                            "miss_to_idle": 4,
                            "tps": {"us-small": 900, "eu-small": 650, LARGE: 320},
                        },
                    },
                    {"name": "reactive", "cooldown_s": 4, "out_above": 0.4, "interval_s": 2},
                    {"name": "target-utilization", "stabilization_s": 20, "interval_s": 3, "kv_use": 0.4},
                ],
                **EVERY_POLICY,
            ),
            {"name": "alone", **EVERY_POLICY, "routing": "least-loaded", "migration": None},
        ],
    },
)
SCORES = "question,answered_by,points,words,prompt_words\n" + "".join(
    f"q{i},{name},{'-1' if i % 17 == 16 else 1 + (i * step) % 9},{40 + (i * 37) % 300},{20 + (i * 53) % 200}\n"
    for i in range(60)
    for name, step in (("tiny", 2), ("huge", 7))
)
LAYOUT = {
    "request": ["question"],
    "model": "answered_by",
    "score": "points",
    "best": 10,
    "worst": 1,
    "no_score": ["-1"],
    "output": "words",
    "output_scale": 1.4,
    "prompt": "prompt_words",
    "prompt_scale": 1.4,
}
SCORED = {
    "quality": {"path": "scores.csv", "layout": LAYOUT, "models": {"tiny": "llama-3.1-8b", "huge": "llama-3.1-70b"}},
    "arrivals": 5,
    "num_requests": 120,
}
SCORED_FLEET = [
    {"model": "llama-3.1-8b", "gpu": "h800-80gb-sxm", "engine": "vllm-0.15"},
    {"model": "llama-3.1-70b", "gpu": "h800-80gb-sxm", "engine": "vllm-0.15", "tp": 4},
]
SCORED_CASCADE = {"models": ["llama-3.1-8b", "llama-3.1-70b"], "policy": {"name": "thresholds", "thresholds": 50}}
case(
    "cascade-own-scores",
    f"simulate scenario.yaml --out out --decisions decisions.jsonl {JSON}",
    files={
        "scores.csv": SCORES,
        "scenario.yaml": {"workload": SCORED, "fleet": SCORED_FLEET, "cascade": SCORED_CASCADE},
    },
)

# Workloads.

BUILTIN = (
    "chat", "chat-sessions", "reasoning", "long-context", "alpaca-eval", "arena-hard", "arena-hard-reasoning-heavy",
    "math-500", "gpqa", "live-code-bench", "pascal-reasoning", "pascal-answering", "ktier", "cnn-dailymail", "sharegpt",
    "longwriter",
)  # fmt: skip
DEMANDS = ("sageserve-july-2025", "sageserve-july-2025-scout", "sageserve-nov-2024")
case(
    "workload-builtin-generated",
    *(f"workload generate --workload {name} --num-requests 50 {name}.parquet" for name in BUILTIN),
    *(f"workload generate --spec {name}.yaml {name}.csv" for name in DEMANDS),
    files={f"{name}.yaml": {"builtin": name, "start_hour": 20, "duration_s": 300, "scale": 0.5} for name in DEMANDS},
)
case(
    "workload-builtin-simulated",
    *(
        f"simulate --workload {name} --num-requests 15 --model llama-3.1-8b --gpu h100 --engine vllm-0.15 "
        f"--out {name} {JSON}"
        for name in BUILTIN
    ),
)
SPECS = {
    "deterministic": {
        "arrivals": {"kind": "deterministic", "rate": 3},
        "prompt_tokens": {"kind": "quantiles", "quantiles": [0, 0.5, 1], "tokens": [10, 200, 900]},
        "output_tokens": {"kind": "geometric", "mean": 50},
    },
    "diurnal": {
        "arrivals": {"kind": "diurnal", "rate": 0.01, "weekend": 0.4, "start_hour": 100},
        "prompt_tokens": {"kind": "lognormal", "p50": 100, "p99": 900},
        "output_tokens": {"kind": "uniform", "min": 16, "max": 64, "step": 16},
        "regions": {"us-east": 2, "eu-west": 1},
    },
    "mix": {
        "arrivals": {"kind": "gamma", "rate": 3, "cv": 2},
        "mix": [{"builtin": "gpqa", "share": 2}, {"prompt_tokens": 50, "output_tokens": lognormal(80)}],
        "tiers": {"mix": "enterprise", "num_tiers": 4},
    },
    "replay": {
        "arrivals": {"kind": "replay", "path": "azure.csv", "rate_scale": 2},
        "prompt_tokens": 100,
        "output_tokens": 20,
    },
    "populations": {
        "demand": {
            "lengths": {"llama-3.1-8b": {"prompt_tokens": 300, "output_tokens": lognormal(50)}},
            "populations": [
                {"tier": 1, "cells": {"us-east": {"llama-3.1-8b": 1}}, "noise_cv": 0.3, "peak_to_trough": 3}
            ],
        },
        "arrivals": 0.2,
        "duration_s": 900,
        "tiers": [{"tier": 1, "ttft_s": 2}],
    },
    "series": {
        "demand": {
            "lengths": {"llama-3.1-8b": {"prompt_tokens": 300, "output_tokens": lognormal(50)}},
            "path": "series.csv",
            "series": {"A": {"model": "llama-3.1-8b", "tier": 1, "regions": "us-east"}},
            "per_s": 60,
        },
        "start_hour": 1,
        "duration_s": 7200,
        "scale": 0.05,
    },
}
SERIES = "time_s,key,tokens\n" + "".join(
    f"{900 * i},{key},{2000 + 15 * ((i * i * 7) % 41) + 900 * (((i + shift) // 24) % 4)}\n"
    for i in range(240)
    for key, shift in (("A", 0), ("B", 12))
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{15 + i // 30:02}:{2 * (i % 30):02}.{i * 7919:07},{50 + (i * 331) % 1900},{5 + (i * 97) % 300}\n"
    for i in range(60)
)
MOONCAKE = "".join(
    f'{{"timestamp": {250 * i}, "input_length": {600 + (i * 211) % 1500}, "output_length": {10 + (i * 31) % 90}, '
    f'"hash_ids": {[i % 3, i % 3 + 10, 100 + i, 200 + i, 300 + i][: -(-(600 + (i * 211) % 1500) // 512)]}}}\n'
    for i in range(40)
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + "".join(
    f"{5 + 3 * i},{'GPT-4' if i % 3 == 0 else 'ChatGPT'},{100 + (i * 89) % 900},{(i * 41) % 300},0,Conversation log\n"
    for i in range(40)
)
SERVEGEN = "window_start_s,client,input_tokens,reason_tokens,answer_tokens\n" + "".join(
    f"{600 * (i % 3)},{i % 7},{50 + (i * 67) % 800},{(i * 131) % 3000},{10 + (i * 29) % 500}\n" for i in range(40)
)
TRACES = {"azure.csv": AZURE, "mooncake.jsonl": MOONCAKE, "burst.csv": BURST, "servegen.csv": SERVEGEN}
case(
    "workload-specs",
    *(f"workload generate --spec {name}.yaml {name}.csv" for name in SPECS),
    files={
        **{f"{name}.yaml": spec if "demand" in spec else {"num_requests": 50, **spec} for name, spec in SPECS.items()},
        "azure.csv": AZURE,
        "series.csv": SERIES,
    },
)
case(
    "workload-traces",
    *(f"workload convert {name} {name}.parquet" for name in TRACES),
    *(f"workload describe {name} --json" for name in TRACES),
    f"simulate scenario.yaml --out out {JSON}",
    "simulate --trace mooncake.jsonl --rate-scale 2 --model qwen3-8b --gpu a100-80gb --engine sglang --out mooncake "
    f"{JSON}",
    f"simulate --trace mooncake/requests.parquet --limit 20 --model qwen3-8b --gpu l40s --out again {JSON}",
    files={
        **TRACES,
        "scenario.yaml": {
            "workload": {
                "trace": {
                    "path": "burst.csv",
                    "from_s": 10,
                    "to_s": 100,
                    "rate_scale": 3,
                    "skip_bad": True,
                    "models": {"GPT-4": "llama-3.1-70b", "ChatGPT": "llama-3.1-8b"},
                }
            },
            "fleet": [pool(), {"model": "llama-3.1-70b", "gpu": "a100-80gb", "tp": 4, "engine": "simulated-0.15"}],
        },
    },
)

# Policies of the user's own. They import nothing of Headway.

OWN = '''
class LongestFirst:
    """By prompt length, the longest first."""

    quantum = None
    preemptive = True

    def __init__(self, least_tokens: int = 0) -> None:
        self.least_tokens = least_tokens

    def rank(self, request, now):
        return (-max(request.prompt_tokens, self.least_tokens), request.arrival_s)


class TwoUntil:
    """Two replicas of each pool until a time, then one."""

    interval_s = 2.0

    def __init__(self, until_s: float = 6.0) -> None:
        self.until_s = until_s

    def scale(self, view):
        return {pool.name: 2 if view.now < self.until_s else 1 for pool in view.pools}
'''
case(
    "policies-own",
    f"simulate scenario.yaml --out out --decisions decisions.jsonl {JSON}",
    files={
        "own_policies.py": OWN,
        "scenario.yaml": {
            "workload": CHAT,
            "fleet": [pool(name="main", start_s=1, max_replicas=3, **TIGHT)],
            "policies": {
                "ordering": {"name": "own_policies:LongestFirst", "least_tokens": 100},
                "scaling": "own_policies:TwoUntil",
            },
        },
    },
)

# Plans.

PLANNED = {
    "workload": {
        "arrivals": 6,
        "num_requests": 200,
        "prompt_tokens": lognormal(500),
        "output_tokens": lognormal(100),
        "tiers": [{"tier": 0, "share": 0.3}, {"tier": 1, "share": 0.7}],
    },
    "fleet": [pool()],
}
case(
    "plan-capacity",
    "plan capacity scenario.yaml --no-cache --gpus l40s,a100-80gb,h100-80gb-sxm --tp 1,2 --routing "
    "least-loaded,power-of-two --ordering fcfs,priority --max-replicas 6 --ttft-p99 1.5 --tpot-p99 0.06 "
    f"--what-if load=2,lose=1 --out plan.yaml {JSON}",
    f"simulate plan.yaml --out out {JSON}",
    "export kubernetes plan.yaml -o manifests --autoscale",
    f"plan capacity scenario.yaml --no-cache --gpus l40s --tp 1 --max-replicas 1 --e2e-p99 0.01 {JSON}",
    "plan capacity scenario.yaml --no-cache --gpus l40s --tp 1 --max-replicas 4 --tpot-p99 0.06 --no-progress",
    files={"scenario.yaml": PLANNED},
    codes={3: 3},
)
GOODPUT = {
    "name": "chat",
    "workload": {"prompt_tokens": 1200, "output_tokens": 150, "arrivals": 20, "num_requests": 150},
    "slo": {"ttft_s": 2, "tpot_s": 0.02},
    "fleet": [{"model": "llama-3.1-8b", "gpu": "h800-80gb-sxm", "engine": "vllm-0.15"}],
}
LONG = {
    **GOODPUT,
    "name": "long",
    "workload": {"prompt_tokens": 1500, "output_tokens": 30, "arrivals": 4, "num_requests": 100},
}
case(
    "plan-combos",
    "plan combos chat.yaml --gpus h800:2:2.8,h20:3:1.5 --rps 25 --sizes 2 --no-cache --profile-requests 100 "
    f"-o plan.yaml {JSON}",
    f"simulate plan.yaml --rate 20 --out out {JSON}",
    "export kubernetes plan.yaml -o manifests",
    "plan combos chat.yaml long.yaml --gpus h800:3:2.8,h20:3:1.5:0.05 --rps 10,4 --sizes 1 --no-cache "
    f"--profile-requests 60 --objective mc --aggregated-only -o plans {JSON}",
    "plan combos chat.yaml --gpus h20:1 --rps 5000 --sizes 1 --no-cache --profile-requests 60 --no-progress",
    files={"chat.yaml": GOODPUT, "long.yaml": LONG},
    codes={4: 3},
)
LONG_SCORED = {**SCORED, "quality": {**SCORED["quality"], "layout": {**LAYOUT, "prompt_scale": 20}}}
"""Prompts so long that the plan splits prefill from decode."""
STAGED = {
    "name": "staged",
    "workload": {"arrivals": 3, "num_requests": 60, "quality": {"trace": 1, "cascade": "llama", "num_requests": 60}},
    "fleet": [{"model": "llama-3-70b", "gpu": "h100-80gb-sxm", "tp": 4}],
}
case(
    "plan-cascade-quality",
    f"plan cascade scenario.yaml --quality 76 --no-cache --curve 2 -o plan.yaml {JSON}",
    f"simulate plan.yaml --out out {JSON}",
    f"plan cascade scenario.yaml --latency 20 --no-cache --no-alternatives {JSON}",
    f"plan cascade scenario.yaml --latency 0.1 --no-cache --no-alternatives --gpus 5 {JSON}",
    files={"scenario.yaml": STAGED},
    codes={3: 3},
)
case(
    "plan-cascade-regret",
    f"plan cascade scenario.yaml --quality 75 --no-cache --no-alternatives --regret=-6:4,5 {JSON}",
    files={"scenario.yaml": STAGED},
)
case(
    "plan-cascade-types-combos",
    "plan cascade scenario.yaml --quality 60 --gpus h800:4:2.8,h20:8:1.5 --combos --no-alternatives --no-cache "
    f"-o plan.yaml {JSON}",
    f"simulate plan.yaml --out out {JSON}",
    f"plan cascade scenario.yaml --quality 50 --latency 30 --gpus h800:4:2.8,h20:4:1.5 --rps 2 --no-alternatives "
    f"--no-cache {JSON}",
    files={
        "scores.csv": SCORES,
        "scenario.yaml": {"workload": {**LONG_SCORED, "arrivals": 3, "num_requests": 100}, "fleet": SCORED_FLEET},
    },
)
case(
    "plan-tiers",
    f"plan tiers scenario.yaml --tiers 1,2,4 --decay 0.5,2 --seeds 2 {JSON}",
    files={
        "scenario.yaml": {
            "workload": {
                "builtin": "ktier",
                "num_requests": 150,
                "arrivals": 300,
                "tiers": [{"tier": 0, "ttft_s": 0.2}, {"tier": 1, "ttft_s": 1}, {"tier": 2, "ttft_s": 3}, {"tier": 3}],
            },
            "fleet": [{"model": "llama-2-7b", "gpu": "a100-80gb", "replicas": 2, "engine": SIMULATED}],
            "policies": {
                "routing": "freest",
                "ordering": {"name": "priority", "preemptive": False},
                "ordering_at": "both",
                "window": 16,
                "migration": {"name": "llumnix", "h_max": 0.1},
            },
        }
    },
)

# Other commands.

case(
    "forecast-evaluate",
    "forecast evaluate series.csv --methods last-value,seasonal-naive,ets,arima:1-0-1,blend,arima:1-0-1-leak "
    f"--step-s 1800 --season 48 --warmup 96 --capacity 900 {JSON}",
    f"forecast evaluate series.csv --only A --of mean --methods seasonal-naive,arima:1-0-0 --horizon 2 {JSON}",
    files={"series.csv": SERIES},
)
case(
    "export-kubernetes",
    "export kubernetes pools.yaml -o pools --namespace llm --token-secret hf --gpu-product l40s=L40S",
    "export kubernetes combos.yaml -o combos",
    "export kubernetes sglang.yaml -o sglang --kind Deployment",
    files={
        "pools.yaml": {
            "fleet": [pool(name="main", replicas=2, max_replicas=4, tp=2)],
            "policies": {"scaling": {"name": "target-utilization", "in_flight": 8}, "ordering": "priority"},
        },
        "combos.yaml": {"combos": [combo(num=(2, 1), replicas=2)]},
        "sglang.yaml": {"fleet": [{"name": "main", "model": LARGE, "tp": 2, "replicas": 2, **H100}]},
    },
)
case(
    "catalog",
    "catalog models --json",
    "catalog gpus --json",
    "catalog engines --json",
    "catalog models deepseek-v3 --json",
    "catalog memory --model llama-3.1-70b --gpu h100 --tp 4 --engine vllm-0.15 --json",
    "measure --model llama-3.1-8b --gpu h100 --dry-run",
    "new scenario.yaml",
    "simulate scenario.yaml --num-requests 20 --warmup-s 0 --routing random --ordering fcfs --no-progress",
)
