"""The cascade question: models, GPUs, a sample of scored requests, and what the plan must reach."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, isfinite
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Handover, Model, Parallel, Role
from headway.planning.combos.problem import DEFAULT_NETWORK_BYTES_PER_S, Offer
from headway.workload.quality import Scores

Floats = npt.NDArray[np.float64]


class Replicas(Struct, frozen=True, order=True, forbid_unknown_fields=True, omit_defaults=True):
    """So many replicas of one shape."""

    tp: int
    pp: int
    count: int
    gpu: str = ""
    """Empty where there is one type only."""
    role: Role = "mixed"
    """The replicas of a set that prefill, and those that decode, are one combo (Cauchy 3.1)."""

    @property
    def num_gpus(self) -> int:
        """Of all of them."""
        return self.tp * self.pp * self.count

    @property
    def parallel(self) -> Parallel:
        """The shape of one."""
        return Parallel(self.tp, self.pp)

    @property
    def label(self) -> str:
        """As in "2 x tp 4 pp 3", "2 x l40s tp 1" where there are several types of GPU, or "2 x tp 1 prefill"."""
        kind = f"{self.gpu} " if self.gpu else ""
        shape = f"{self.count} x {kind}tp {self.tp}" + (f" pp {self.pp}" if self.pp > 1 else "")
        return shape if self.role == "mixed" else f"{shape} {self.role}"


class ReplicaSet(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """All replicas of one model: data parallelism over replicas that may differ in shape (3.2)."""

    parts: tuple[Replicas, ...]

    @property
    def num_gpus(self) -> int:
        """Of all replicas."""
        return sum(part.num_gpus for part in self.parts)

    @property
    def label(self) -> str:
        """As in "5 x tp 2, 1 x tp 4"."""
        return ", ".join(part.label for part in self.parts)


class Split(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """A kind of combo: which replicas prefill, which decode, and how many of the ones go with the others."""

    prefill: Parallel
    decode: Parallel
    least: float
    """Prefill replicas for each that decodes, from..."""
    most: float
    """...to. Whole numbers of both are rounded to either side."""
    prefill_gpu: str = ""
    """Empty where there is one type only."""
    decode_gpu: str = ""


class Handing(Struct, frozen=True, forbid_unknown_fields=True):
    """How the replicas of a combo hand KV caches over."""

    network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S
    """Of one replica, each way."""
    handover: Handover = Handover("layerwise", 8)


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of a stage's requests, one element a request, in the order in which they come. Do not write to them."""

    prompt_tokens: Floats
    computed_tokens: Floats
    """Of the prompt, those that no prefix cache is taken to hold."""
    output_tokens: Floats

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @cached_property
    def key(self) -> str:
        """The same for the same numbers, and for no others."""
        digest = hashlib.sha256()
        for column in (self.prompt_tokens, self.computed_tokens, self.output_tokens):
            digest.update(np.ascontiguousarray(column, "f8").tobytes())
        return digest.hexdigest()[:24]


class Evaluator(Protocol):
    """Says how long 95% of a stage's requests take at most. The same arguments give the same answer.

    The requests are those of `lengths`, once or several times over, all arriving within as much time as they take at
    `rate_rps` on average; the percentile is of all of them. Infinite where they cannot be served.
    """

    def p95_latency_s(self, model: Model, replicas: ReplicaSet, rate_rps: float, lengths: Lengths) -> float: ...


class QualityFloor(Struct, frozen=True, forbid_unknown_fields=True, tag="quality"):
    """Least latency at a mean score of at least `q_min` (3.3)."""

    q_min: float
    mu: float = 1e6
    """Penalty, s, of missing it by the whole way from utopia to nadir. The default is never worth paying."""

    def __post_init__(self) -> None:
        if not 0 <= self.q_min <= 100 or not 0 < self.mu < inf:
            raise ValueError(f"q_min {self.q_min}, mu {self.mu}; expected a score from 0 to 100, and a weight above 0")


class LatencyBudget(Struct, frozen=True, forbid_unknown_fields=True, tag="latency"):
    """Highest mean score at a p95 latency of at most `latency_s` (appendix C)."""

    latency_s: float
    nu: float = 1e6
    """Penalty, in points, of missing it by the whole range of latencies. The default is never worth paying."""

    def __post_init__(self) -> None:
        if not 0 < self.latency_s < inf or not 0 < self.nu < inf:
            raise ValueError(f"latency_s {self.latency_s}, nu {self.nu}; expected seconds and a weight above 0")


class Cheapest(Struct, frozen=True, forbid_unknown_fields=True, tag="cost"):
    """Least cost at a mean score of at least `q_min` and a p95 latency of at most `latency_s`."""

    q_min: float
    latency_s: float
    mu: float = 1e6
    """Penalty, $/h, of missing the score by the whole way from utopia to nadir. The default is never worth paying."""

    def __post_init__(self) -> None:
        if not 0 <= self.q_min <= 100 or not 0 < self.latency_s < inf or not 0 < self.mu < inf:
            raise ValueError(f"{self}; expected a score from 0 to 100, seconds and a weight above 0")


Target = QualityFloor | LatencyBudget | Cheapest


@dataclass(frozen=True)
class Problem:
    """What is asked. Stages are models, the smallest first; `scores` has a column for each of them."""

    models: tuple[Model, ...]
    gpu: Gpu
    engine: Engine
    num_gpus: int
    rate_rps: float
    """Of the requests that come in, all of which the first stage gets."""
    scores: Scores
    target: Target
    gpus_per_server: int | None = None
    """None: the catalog's node."""
    judge_s: float = 0.27
    """What judging adds to a stage that is not the last (appendix H)."""
    span_s: float = 60.0
    """How long requests come at this rate: so long the latency of a stage is told over. A stage that gets more than it
    can do is later the longer that lasts."""
    prefix_hit_rate: float = 0.0
    """The share of prompt tokens that prefix caches hold (appendix M)."""
    use_all: bool = False
    """Every GPU must be given to a stage, as in 3.2; otherwise as many as help, as in appendix D."""
    max_pp: int = 4
    max_kinds: int | None = 2
    """Shapes that one model's replicas may have at a time (Table 3 shows two at most), on each type of GPU; None: any
    number."""
    others: tuple[Offer, ...] = ()
    """GPUs of further types, beside `num_gpus` of `gpu`, each with a limit."""
    usd_per_gpu_hour: float | None = None
    """Of `gpu`; None: the catalog's."""
    max_types: int | None = 2
    """Types of GPU that one model's replicas may have at a time; None: any number."""
    splits: Mapping[str, tuple[Split, ...]] = field(default_factory=dict)
    """Kinds of combos that a model's replicas may be, too; a set has one of them at most."""
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(model.name for model in self.models))
        if self.scores.models != self.names:
            object.__setattr__(self, "scores", self.scores.stages(self.names))
        if not len(self.scores):
            raise HeadwayError("scores: no requests to plan for")
        if self.num_gpus < 1:
            raise HeadwayError(f"num_gpus: {self.num_gpus}; expected 1 or more")
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
        self._check_others()

    def _check_others(self) -> None:
        if not self.others:
            return
        names = [offer.gpu.name for offer in self.offers]
        if len(set(names)) < len(names):
            raise HeadwayError(f"GPUs: {', '.join(names)}; expected each type once")
        for offer in self.others:
            if not offer.limit:
                raise HeadwayError(f"{offer.gpu.name}: expected how many there are, 1 or more")
        if self.use_all:
            raise HeadwayError("use_all: with one type of GPU only")

    @property
    def offers(self) -> tuple[Offer, ...]:
        """Every type of GPU: how many, at which price, in which servers."""
        return (Offer(self.gpu, self.num_gpus, self.usd_per_gpu_hour, self.gpus_per_server), *self.others)

    @property
    def total_gpus(self) -> int:
        """Of all types."""
        return sum(offer.limit or 0 for offer in self.offers)

    @property
    def hardware(self) -> str:
        """As in "16 x h100-80gb-sxm + 8 x l40s"."""
        return " + ".join(f"{offer.limit} x {offer.gpu.name}" for offer in self.offers)

    @property
    def server(self) -> int:
        """GPUs of one server."""
        return self.gpu.gpus_per_node if self.gpus_per_server is None else self.gpus_per_server

    def lengths(self, stage: int, reached: npt.NDArray[np.bool_]) -> Lengths:
        """Of the requests that reach the stage; prefill is shortened by what prefix caches hold (Eq. 1)."""
        prompts = self.scores.prompt_tokens[reached].astype("f8")
        computed = np.maximum(np.round((1 - self.prefix_hit_rate) * prompts), 1.0)
        return Lengths(prompts, computed, self.scores.output_tokens[reached, stage].astype("f8"))

    def asking(self, target: Target) -> Problem:
        """The same with another target."""
        return replace(self, target=target)


def of_type(model: Model, other: str) -> str:
    """The key of coefficients: the model's name, and that of the GPU where it is not of the first type."""
    return f"{model.name} on {other}" if other else model.name


def longest_tokens(room_tokens: int, engine: Engine) -> int:
    """The longest request, prompt and output together, that a replica with so much KV cache surely takes."""
    blocks = room_tokens // engine.block_size_tokens
    return (blocks - ceil(blocks * engine.watermark)) * engine.block_size_tokens
