"""Notes of a result beside its numbers: rejected requests, a forecaster that knew the future, plans made on the way."""

from __future__ import annotations

from headway.control.policies import Policies
from headway.core.fleet import Pool
from headway.core.policy import Scaler
from headway.core.record import Outcome, Records
from headway.policies.resolve import PolicyChoice
from headway.scenario.long_term import knows_future
from headway.scenario.replan import replanner_of


def rejections(records: Records, pools: tuple[Pool, ...]) -> list[str]:
    """How many requests were rejected, and why."""
    rejected = records.requests["request"][records.requests["outcome"] == Outcome.REJECTED]
    if not len(rejected):
        return []
    contexts = {pool.model.name: pool.model.max_context_tokens for pool in pools}
    limit = max(min(replica.kv_capacity_tokens, contexts[replica.model]) for replica in records.replicas)
    tokens = records.workload["prompt_tokens"][rejected] + records.workload["output_tokens"][rejected]
    too_long = int((tokens > limit).sum())
    notes = [f"rejected: {too_long:,} requests of more than {limit:,} tokens, the most that a replica takes"]
    if too_long < len(rejected):
        notes.append(f"rejected: {len(rejected) - too_long:,} requests that no queue had room for")
    return notes if too_long else notes[1:]


def leaks(scaler: PolicyChoice[Scaler] | None) -> list[str]:
    """A warning where the scaler's forecaster knew the run's own demand."""
    if not knows_future(scaler):
        return []
    return ["cheating: the forecaster is fitted on the demand of this very run, its future included"]


def new_plans(policies: Policies) -> list[str]:
    """The plans that the policies followed, and failures to plan."""
    planner = replanner_of(policies)
    return [] if planner is None else planner.messages
