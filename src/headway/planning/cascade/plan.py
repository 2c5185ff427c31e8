"""The resulting plan: a cascade's thresholds, GPUs and replica sets. Frozen values, fit for JSON."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headway.planning.cascade.problem import Replicas, Target


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
    """None: excluded by its bound before it was evaluated, or not deployable."""
    bound_s: float | None
    """No deployment of the routing is faster; None if it cannot be deployed."""
    objective: float | None
    best: bool
    """Whether it was the best so far."""


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
    """No deployment of this routing is faster; None: unknown."""
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
