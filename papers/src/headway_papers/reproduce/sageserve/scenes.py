"""The fleets, workloads and strategies of SageServe's evaluation.

Four models in three regions start with 20 instances of each in each region, and keep at least two, as in the paper (4,
7.1). An instance is smaller than the paper's, and so is the load: four A100s (Bloom, which does not fit, has eight)
with 14,000 tokens of KV cache (Bloom: 6,000), half of the published requests for Llama-2, a quarter of those for Bloom
and a twentieth of those for the small models, which stay at two instances even with all of their requests (4). The
cache is small because the paper scales by memory in use, and its simulator counts the keys and values of all heads for
each token. These are eight times the size under grouped-query attention, so its memory fills like these caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]

LLAMA_2, BLOOM, LLAMA_31, LLAMA_32, SCOUT = "llama-2-70b", "bloom-176b", "llama-3.1-8b", "llama-3.2-3b", "llama-4-scout"
MODELS = (BLOOM, LLAMA_2, LLAMA_31, LLAMA_32)
GPUS: Mapping[str, int] = {BLOOM: 8, LLAMA_2: 4, LLAMA_31: 4, LLAMA_32: 4, SCOUT: 4}
KV_TOKENS: Mapping[str, int] = {BLOOM: 6_000, LLAMA_2: 14_000, LLAMA_31: 50_000, LLAMA_32: 50_000, SCOUT: 50_000}
LOAD: Mapping[str, float] = {BLOOM: 0.25, LLAMA_2: 0.5, LLAMA_31: 0.05, LLAMA_32: 0.05, SCOUT: 0.5}
"""Share of the published requests for each model."""
REGIONS = ("us-east", "us-central", "us-west")
A100, H100 = "a100-80gb", "h100-80gb"
JULY, JULY_SCOUT, NOVEMBER = "sageserve-july-2025", "sageserve-july-2025-scout", "sageserve-nov-2024"
NOVEMBER_LOAD = 5 * 302 / 362.25
"""Load relative to July: November's trace has a fifth of the requests and took 302 instance-hours, not 362 (7.2.7). An
instance is the same here, so the load must correspond to the instances."""
H100_LOAD = 1.9
"""Load factor equal to the higher theta of an H100 instance, so that about the same number is needed."""
START, LEAST, MOST = 20, 2, 40
THURSDAY, FRIDAY = 168 + 72, 168 + 96
"""Hours at which days of the second week begin. Thursday is the busiest."""
WARMUP_S = 3600.0
"""Time in which the initial fleet shrinks to the needed size."""

SILOED, REACTIVE, GUARDED, CHIRON = "siloed", "reactive", "reactive (guarded)", "chiron"
REACTIVE_50 = "reactive (50%)"
EACH_REQUEST = "reactive (each request)"
EACH_REQUEST_S = 0.2
"""Approximate time between two requests of a busy hour: memory is checked as often as requests come (7.1)."""
LT_I, LT_U, LT_UA = "lt-i", "lt-u", "lt-ua"
LEAK = "lt-ua (leaked forecast)"
STRATEGIES = (SILOED, REACTIVE, GUARDED, EACH_REQUEST, CHIRON, LT_I, LT_U, LT_UA, LEAK)
ORDERINGS: Mapping[str, Any] = {
    "fcfs": {"name": "priority-first", "classes": [2]},
    "edf": "edf",
    "pf": "priority-first",
    "dpa": "deadline-priority",
}
"""6.5. FCFS keeps batch work behind both interactive tiers (6.1)."""
TAUS_S = (0.0, 1.0, 10.0)
"""DPA's tau_n, after which an expired request goes first again. The paper gives none; 10 s is the policy's default."""
SILOS = {"interactive_suffix": "-interactive", "batch_suffix": "-batch"}
POOLS: Mapping[str, Mapping[str, int]] = {
    SILOED: {"-interactive": 16, "-batch": 4},
    CHIRON: {"-interactive": 10, "": 5, "-batch": 5},
}
"""Initial instances (4, 7.1)."""
BURST_S = (5700.0, 7200.0)


@dataclass(frozen=True)
class Scene:
    """The workload and fleet of a run."""

    theta: Mapping[str, float] = field(default_factory=dict)
    """Input tokens per second that an instance serves in time, by model."""
    models: tuple[str, ...] = MODELS
    gpu: str = A100
    builtin: str = JULY
    load: float = 1.0
    """Additional factor on `LOAD`."""
    from_hour: float = THURSDAY + 10
    hours: float = 6.0
    forecaster: str = "arima"
    guard: bool = False
    """Whether LT strategies count starting instances. The paper's do not."""
    step_s: float = 1800.0


def document(scene: Scene, strategy: str) -> Document:
    pools = POOLS.get(strategy, {"": START})
    fleet = [
        pool(scene.gpu, model, region, suffix, num)
        for model in scene.models
        for region in REGIONS
        for suffix, num in pools.items()
    ]
    return whole_document(scene, fleet, policies_of(scene, strategy))


def burst(scene: Scene, strategy: str) -> Document:
    """Eight times the load in the last 25 minutes of an hour (7.2.7)."""
    whole = document(scene, strategy)
    whole["workload"]["surges"] = [{"from_s": BURST_S[0], "to_s": BURST_S[1], "factor": 8}]
    return whole


def pool(gpu: str, model: str, region: str, suffix: str, num: int) -> Document:
    """`num` instances of a model in a region."""
    return {
        "name": f"{region}-{model}{suffix}",
        "model": model,
        "gpu": gpu,
        "tp": GPUS[model],
        "region": region,
        "replicas": num,
        "min_replicas": LEAST,
        "max_replicas": MOST,
        "kv_capacity_tokens": KV_TOKENS[model],
        "engine": "simulated-0.15",
    }


def policies_of(scene: Scene, strategy: str) -> Document:
    """The paper's baselines share routers and orderings with SageServe (7.1), and do not count starting instances
    (4)."""
    silos = SILOS if strategy in POOLS else {}
    policies: Document = {"routing": {"name": "sageserve", **silos}, "ordering": ORDERINGS["fcfs"]}
    if strategy != SILOED:  # its batch requests have separate instances
        suffixes = {key: silos[key] for key in silos if key.startswith("interactive")}
        policies["admission"] = {"name": "queue-manager", **suffixes}
    if strategy in (SILOED, REACTIVE, GUARDED):
        return policies | {"scaling": {"name": "reactive", "pending_guard": strategy == GUARDED}}
    if strategy == EACH_REQUEST:
        each = {"name": "reactive", "pending_guard": False, "interval_s": EACH_REQUEST_S}
        return policies | {"scaling": each}
    if strategy == CHIRON:
        return policies | {"scaling": {"name": CHIRON, **SILOS}}
    name = LT_UA if strategy == LEAK else strategy
    leak = "-leak" if strategy == LEAK else ""
    scaling: Document = {
        "name": name,
        "planner": "ilp",
        "forecaster": {"name": scene.forecaster + leak, "past_hours": 72},
        "plan": {"step_s": scene.step_s, "tps": {model: scene.theta[model] for model in scene.models}},
    }
    if name != LT_I:
        scaling["pending_guard"] = scene.guard
    return policies | {"scaling": scaling}


def whole_document(scene: Scene, fleet: list[Document], policies: Document) -> Document:
    """A scene with these pools and policies."""
    duration_s = scene.hours * 3600
    workload: Document = {
        "builtin": scene.builtin,
        "models": {model: LOAD[model] for model in scene.models},
        "scale": scene.load,
        "start_hour": scene.from_hour,
        "duration_s": duration_s,
    }
    gpus = START * sum(GPUS[model] for model in scene.models)
    return {
        "workload": workload,
        "fleet": fleet,
        "policies": policies,
        "gpu_limits": [{"region": region, "gpu": scene.gpu, "count": gpus} for region in REGIONS],
        "network": {"inter_region_s": 0.05},
        "provisioning": {"reclaim_s": 60, "redeploy_s": 600, "acquire_s": 600},
        "simulation": {"until_s": duration_s, "warmup_s": min(WARMUP_S, duration_s / 2)},
    }


def mixed(batch_share: float, scale: float) -> Document:
    """Keys of a workload with this share of batch requests. Interactive requests stay as in November, where they are
    three quarters."""
    return {
        "scale": scale * 0.75 / (1 - batch_share),
        "tiers": [
            {"tier": 1, "share": 1 - batch_share, "ttft_s": 60},
            {"tier": 2, "share": batch_share, "deadline_after_s": 86400},
        ],
    }
