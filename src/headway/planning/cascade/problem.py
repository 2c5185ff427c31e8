"""The cascade problem and its plan: models, GPUs, scored requests and a target; thresholds, GPUs and replica sets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, isfinite
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.counts import check_count
from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Handover, Model, Parallel, Role
from headway.planning.combos.problem import DEFAULT_NETWORK_BYTES_PER_S, Offer
from headway.workload.quality import Scores

Floats = npt.NDArray[np.float64]
MOST_GPUS = 512
"""Maximum number of GPUs of one type. The search keeps every number of GPUs of each stage: 17 s of CPU for 512, 50 s
and 5.6 GB for 1,024."""


class Replicas(Struct, frozen=True, order=True, forbid_unknown_fields=True, omit_defaults=True):
    """`count` replicas of one shape: `pp` stages of `tp` ranks each."""

    tp: int
    pp: int
    count: int
    gpu: str = ""
    """Type of GPU; empty if there is only one type."""
    role: Role = "mixed"
    """The prefill replicas and the decode replicas of a set form one combo (Cauchy 3.1)."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.count

    @property
    def parallel(self) -> Parallel:
        return Parallel(self.tp, self.pp)

    @property
    def label(self) -> str:
        """A label such as "2 x tp 4 pp 3", "2 x l40s tp 1" with several types of GPU, or "2 x tp 1 prefill"."""
        kind = f"{self.gpu} " if self.gpu else ""
        shape = f"{self.count} x {kind}tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")
        return shape if self.role == "mixed" else f"{shape} {self.role}"


class ReplicaSet(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """All replicas of one model: data parallelism over replicas that may differ in shape (3.2)."""

    parts: tuple[Replicas, ...]

    @property
    def num_gpus(self) -> int:
        return sum(part.num_gpus for part in self.parts)

    @property
    def label(self) -> str:
        """A label such as "5 x tp 2, 1 x tp 4"."""
        return ", ".join(part.label for part in self.parts)


class ComboShapes(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A kind of combo: the shapes for prefill and decode, and the range of their ratio."""

    prefill: Parallel
    decode: Parallel
    least: float
    """Fewest prefill replicas per decode replica; counts are rounded up or down to whole numbers."""
    most: float
    """Maximum number of prefill replicas per decode replica."""
    prefill_gpu: str = ""
    """Type of the prefill replicas' GPU; empty if there is only one type."""
    decode_gpu: str = ""


class HandoverSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How the replicas of a combo hand over KV caches."""

    network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S
    """Bandwidth of one replica in each direction."""
    handover: Handover = Handover("layerwise", 8)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Token counts of a stage's requests, one element per request, in order of arrival. Read-only."""

    prompt_tokens: Floats
    computed_tokens: Floats
    """Prompt tokens that no prefix cache contains."""
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def key(self) -> str:
        """A digest of the numbers."""
        digest = hashlib.sha256()
        for column in (self.prompt_tokens, self.computed_tokens, self.output_tokens):
            digest.update(np.ascontiguousarray(column, "f8").tobytes())
        return digest.hexdigest()[:24]


class StageEvaluator(Protocol):
    """Computes the p95 latency of a stage. The same arguments give the same result.

    The requests are those of `lengths`, once or repeated, and arrive at `rate_rps` on average; the percentile covers
    all of them. Infinite if they cannot be served.
    """

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float: ...


class QualityFloor(Struct, frozen=True, forbid_unknown_fields=True, tag="quality"):
    """Minimise latency at a mean score of at least `q_min` (3.3)."""

    q_min: float
    mu: float = 1e6
    """Penalty in seconds for missing `q_min` by the range from nadir to utopia. At the default, missing it never
    pays."""

    def __post_init__(self) -> None:
        if not 0 <= self.q_min <= 100 or not 0 < self.mu < inf:
            raise ValueError(f"q_min {self.q_min}, mu {self.mu}; expected a score from 0 to 100, and a weight above 0")


class LatencyBudget(Struct, frozen=True, forbid_unknown_fields=True, tag="latency"):
    """Maximise the mean score at a p95 latency of at most `latency_s` (appendix C)."""

    latency_s: float
    nu: float = 1e6
    """Penalty in points for missing `latency_s` by the range of latencies. At the default, missing it never pays."""

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < inf or not 0 < self.nu < inf:
            raise ValueError(f"latency_s {self.latency_s}, nu {self.nu}; expected seconds and a weight above 0")


class Cheapest(Struct, frozen=True, forbid_unknown_fields=True, tag="cost"):
    """Minimise the cost at a mean score of at least `q_min` and a p95 latency of at most `latency_s`."""

    q_min: float
    latency_s: float
    mu: float = 1e6
    """Penalty in $/h for missing `q_min` by the range from nadir to utopia. At the default, missing it never pays."""

    def __post_init__(self) -> None:
        if not 0 <= self.q_min <= 100 or not 0 < self.latency_s < inf or not 0 < self.mu < inf:
            raise ValueError(f"{self}; expected a score from 0 to 100, seconds and a weight above 0")


Target = QualityFloor | LatencyBudget | Cheapest


def target_of(quality: float | None, latency_s: float | None) -> Target:
    """The target of a mean score, a p95 latency or both. Raises HeadwayError for neither, or no score."""
    if quality is not None and not 0 <= quality <= 100:
        raise HeadwayError(f"quality: {quality!r}; expected a mean score from 0 to 100")
    if latency_s is None:
        if quality is None:
            raise HeadwayError("expected quality or latency_s, or both")
        return QualityFloor(quality)
    return LatencyBudget(latency_s) if quality is None else Cheapest(quality, latency_s)


class JudgeError(Struct, frozen=True, forbid_unknown_fields=True):
    """The error of a judge's scores in points: mean and standard deviation."""

    bias: float
    noise: float

    def __post_init__(self) -> None:
        if not -100 <= self.bias <= 100 or not 0 <= self.noise <= 100:
            raise ValueError(f"bias {self.bias:g}, noise {self.noise:g}; expected -100 to 100, and 0 to 100")


@dataclass(frozen=True)
class CascadeProblem:
    """Stages are models, the smallest first; `scores` has a column for each of them."""

    models: tuple[Model, ...]
    gpu: Gpu
    engine: Engine
    num_gpus: int
    rate_rps: float
    """Arrival rate. The first stage gets all requests."""
    scores: Scores
    target: Target
    gpus_per_server: int | None = None
    """GPUs of a server; None: the size of the catalog's node."""
    judge_s: float = 0.27
    """Seconds that judging adds to every stage but the last (appendix H)."""
    span_s: float = 60.0
    """Time for which requests arrive when a stage's latency is measured. A longer time gives an overloaded stage a
    higher latency."""
    prefix_hit_rate: float = 0.0
    """Share of prompt tokens that prefix caches hold (appendix M)."""
    use_all: bool = False
    """Assign every GPU to a stage, as in 3.2; otherwise only GPUs that help, as in appendix D."""
    max_pp: int = 4
    max_kinds: int | None = 2
    """Maximum number of shapes of one model's replicas at a time on each type of GPU (Table 3 has at most two); None:
    unlimited."""
    other_offers: tuple[Offer, ...] = ()
    """GPUs of further types, in addition to `num_gpus` of `gpu`, each with a limit."""
    usd_per_gpu_hour: float | None = None
    """Price of `gpu`; None: the catalog's."""
    max_types: int | None = 2
    """Maximum number of types of GPU of one model's replicas at a time; None: unlimited."""
    combo_kinds: Mapping[str, tuple[ComboShapes, ...]] = field(default_factory=dict)
    """Kinds of combos allowed in each model's replica sets; a set has at most one."""
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(model.name for model in self.models))
        if self.scores.models != self.names:
            object.__setattr__(self, "scores", self.scores.stages(self.names))
        if not len(self.scores):
            raise HeadwayError("scores: no requests to plan for")
        check_count("num_gpus", self.num_gpus, MOST_GPUS)
        for offer in self.other_offers:
            check_count(f"GPUs ({offer.gpu.name})", offer.limit or 0, MOST_GPUS, 0)
        if self.gpus_per_server is not None and self.gpus_per_server < 1:
            raise HeadwayError(f"gpus_per_server: {self.gpus_per_server}; expected 1 or more")
        if not (isfinite(self.rate_rps) and self.rate_rps > 0):
            raise HeadwayError(f"rate_rps: {self.rate_rps}; expected a number above 0")
        if not (isfinite(self.span_s) and self.span_s > 0):
            raise HeadwayError(f"span_s: {self.span_s}; expected a number above 0")
        if not 0 <= self.prefix_hit_rate < 1:
            raise HeadwayError(f"prefix_hit_rate: {self.prefix_hit_rate}; expected 0 to less than 1")
        if not 0 <= self.judge_s < inf:
            raise HeadwayError(f"judge_s: {self.judge_s}; expected 0 or more")
        self._check_offers()

    def _check_offers(self) -> None:
        if not self.other_offers:
            return
        names = [offer.gpu.name for offer in self.offers]
        if len(set(names)) < len(names):
            raise HeadwayError(f"GPUs: {', '.join(names)}; expected each type once")
        for offer in self.other_offers:
            if not offer.limit:
                raise HeadwayError(f"{offer.gpu.name}: expected how many there are, 1 or more")
        if self.use_all:
            raise HeadwayError("use_all: with one type of GPU only")

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Every type of GPU: number, price, size of servers."""
        return (Offer(self.gpu, self.num_gpus, self.usd_per_gpu_hour, self.gpus_per_server), *self.other_offers)

    @property
    def total_gpus(self) -> int:
        return sum(offer.limit or 0 for offer in self.offers)

    @property
    def hardware(self) -> str:
        """A text such as "16 x h100-80gb-sxm + 8 x l40s"."""
        return " + ".join(f"{offer.limit} x {offer.gpu.name}" for offer in self.offers)

    @property
    def server(self) -> int:
        return self.gpu.gpus_per_node if self.gpus_per_server is None else self.gpus_per_server

    def lengths(self, stage: int, reached: npt.NDArray[np.bool_]) -> Lengths:
        """Lengths of the requests that reach the stage. Prefix caches shorten the prefill (Eq. 1)."""
        prompts = self.scores.prompt_tokens[reached].astype("f8")
        computed = np.maximum(np.round((1 - self.prefix_hit_rate) * prompts), 1.0)
        return Lengths(prompts, computed, self.scores.output_tokens[reached, stage].astype("f8"))

    def with_target(self, target: Target) -> CascadeProblem:
        return replace(self, target=target)


def coefficients_key(model: Model, other: str) -> str:
    """The key of coefficients: the model, and `other`, the GPU if it is not of the first type."""
    return f"{model.name} on {other}" if other else model.name


def longest_request_tokens(room_tokens: int, engine: Engine) -> int:
    """The most prompt and output tokens of a request that a replica with `room_tokens` of KV cache always accepts."""
    blocks = room_tokens // engine.block_size_tokens
    return (blocks - ceil(blocks * engine.watermark)) * engine.block_size_tokens


# What a planner answers.


class StagePlan(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    num_gpus: int
    """0 if no request reaches the model."""
    replicas: tuple[Replicas, ...]
    """Replicas; they use at most `num_gpus` GPUs."""
    threshold: float | None
    """Answers with at least this score are accepted. None: all are accepted (the last stage), or answers are not
    judged."""
    processing_ratio: float
    """The share of all requests that reaches the model."""
    rate_rps: float
    p95_latency_s: float | None
    """Includes judging; None if no request reaches the model."""

    @property
    def gpus(self) -> str:
        """A text such as "4", or with several types "16 h100-80gb-sxm + 2 l40s"."""
        by_type = dict[str, int]()
        for part in self.replicas:
            by_type[part.gpu] = by_type.get(part.gpu, 0) + part.num_gpus
        named = [f"{num} {name}" for name, num in by_type.items() if name]
        return " + ".join(named) or str(self.num_gpus)

    @property
    def shapes(self) -> str:
        """A text such as "4 x tp 1", "1 x h100-80gb-sxm tp 1 prefill, 2 x a100-80gb tp 1 decode" or "-"."""
        return ", ".join(part.label for part in self.replicas) or "-"


class Round(Struct, frozen=True, forbid_unknown_fields=True):
    """One round of the bi-level search: a routing and its deployment."""

    thresholds: tuple[float, ...]
    processing_ratios: tuple[float, ...]
    quality: float
    latency_s: float | None
    """The latency; None: excluded by its bound before it was evaluated, or not deployable."""
    bound_s: float | None
    """Lower bound of the latency of all deployments of the routing; None if it cannot be deployed."""
    objective: float | None
    best: bool
    """Whether the round was the best so far."""


class HeldOut(Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds applied to held-out requests."""

    num_requests: int
    processing_ratios: tuple[float, ...]
    quality: float | None


class CascadePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of the planner, and of every baseline."""

    status: Literal["optimal", "converged", "infeasible"]
    """`optimal`: every other routing was solved or excluded, within the allowed gap. `converged`: the last rounds found
    no better routing. `infeasible`: the target is out of reach; this plan is the nearest, and `why` tells how near."""
    planner: str
    target: Target
    stages: tuple[StagePlan, ...]
    num_gpus: int
    """GPUs of the problem."""
    gpus_used: int
    latency_s: float
    """The largest p95 of the stages, which is minimised."""
    bound_s: float | None
    """Lower bound of the latency of all deployments of this routing; None: unknown."""
    quality: float
    """Quality on the sample on which the plan was made."""
    objective: float
    utopia_quality: float
    nadir_quality: float
    rounds: tuple[Round, ...]
    num_evaluations: int
    """Evaluations of replica sets for this plan."""
    num_remembered: int
    """Evaluations that were already known."""
    num_sets: int
    """Replica sets that were considered, most of them only by their bounds."""
    why: str
    pre_routed: bool = False
    """Whether each request is sent to one model before generation, instead of from model to model."""
    held_out: HeldOut | None = None
    notes: tuple[str, ...] = ()

    @property
    def thresholds(self) -> tuple[float, ...]:
        """Thresholds of all stages except the last."""
        return tuple(stage.threshold for stage in self.stages[:-1] if stage.threshold is not None)
