"""The trial of each kind of policy that decides on views of replicas, and the rules of its decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from headway.core.decision import Move, Placement, Release
from headway.core.policy import Admission, Cascade, Migration, Router, Scaler
from headway.testing.stories import (
    AdmissionStep,
    CascadeStep,
    FleetStep,
    PoolsStep,
    draw_admission_story,
    draw_cascade_story,
    draw_migration_story,
    draw_pools_story,
    draw_replica,
    draw_story,
)
from headway.testing.strict_views import (
    BrokenPolicyError,
    PolicyCall,
    admission_view,
    cascade_view,
    fleet_view,
    pools_view,
    request_view,
)
from headway.testing.trial import Conformance, Make, Trial, check_interval, common_checks, states_its_interval

DAY_S = 86_400.0


class RouterTrial(Trial[Router, FleetStep]):
    """Plays views with one or many replicas. Replicas vanish and return, and loads are unknown or absurd."""

    draw_story = staticmethod(draw_story)
    num_steps = 60

    def decide(self, step: FleetStep, call: PolicyCall) -> Placement:
        view = fleet_view(step.now, self.random, step.replicas, call)
        placement = self.policy.route(request_view(step.request, call), view)
        if not isinstance(placement, Placement):
            raise BrokenPolicyError(f"returned {placement!r}; a router returns a Placement")
        return placement

    def check_decision(self, step: FleetStep, decision: Placement) -> None:
        """The placement must be a replica of the view, and its decode replica a replica of the same combo.

        Only a router with `pairs = True` may name a decode replica.
        """
        chosen, decode = decision.replica, decision.decode
        combos = {replica["id"]: replica["combo"] for replica in step.replicas}
        if chosen not in combos:
            raise BrokenPolicyError(f"chose replica {chosen!r}; it was offered {sorted(combos)}")
        if decode is None:
            return
        if not getattr(self.policy, "pairs", False):
            raise BrokenPolicyError(f"decodes at replica {decode!r}; only a router with `pairs = True` may say where")
        if combos.get(decode) != combos[chosen]:
            own = sorted(id for id, combo in combos.items() if combo == combos[chosen])
            raise BrokenPolicyError(f"decodes at replica {decode!r}; the chosen combo has the replicas {own}")


class ScalerTrial(Trial[Scaler, PoolsStep]):
    draw_story = staticmethod(draw_pools_story)
    num_steps = 30

    def decide(self, step: PoolsStep, call: PolicyCall) -> dict[str, int]:
        wanted = self.policy.scale(pools_view(step.now, self.random, step.pools, step.arrived, call))
        if not isinstance(wanted, Mapping):
            raise BrokenPolicyError(f"returned {wanted!r}; a scaler returns counts by pool")
        return dict(wanted)

    def check_decision(self, step: PoolsStep, decision: dict[str, int]) -> None:
        """Every count must be for a pool in the view, from `min_replicas` to `max_replicas`."""
        bounds = {pool["name"]: (pool["min_replicas"], pool["max_replicas"]) for pool in step.pools}
        for name, count in decision.items():
            if name not in bounds:
                raise BrokenPolicyError(f"scales pool {name!r}; the view has {sorted(bounds)}")
            low, high = bounds[name]
            if type(count) is not int or not low <= count <= high:
                raise BrokenPolicyError(f"wants {count!r} replicas in pool {name!r}; it may have {low} to {high}")


class CascadeTrial(Trial[Cascade, CascadeStep]):
    """At each step one request enters, and the answer of one stage is accepted or rejected."""

    draw_story = staticmethod(draw_cascade_story)
    num_steps = 30

    def decide(self, step: CascadeStep, call: PolicyCall) -> tuple[int, bool]:
        request = request_view(step.request, call)
        entered = self.policy.enter(request, cascade_view(step.now, self.random, 0, step.stages, call))
        view = cascade_view(step.now, self.random, step.stage, step.stages, call)
        return entered, self.policy.accept(request, step.score, view)

    def check_decision(self, step: CascadeStep, decision: tuple[int, bool]) -> None:
        """`enter` must return the index of a stage of the view, `accept` True or False."""
        entered, accepted = decision
        if type(entered) is not int or not 0 <= entered < len(step.stages):
            raise BrokenPolicyError(f"enters at stage {entered!r}; it may be 0 to {len(step.stages) - 1}")
        if type(accepted) is not bool:
            raise BrokenPolicyError(f"`accept` returned {accepted!r}; it must be True or False")


class MigrationTrial(Trial[Migration, FleetStep]):
    """Each step is a tick (unless the policy's interval is None) and a phase change."""

    draw_story = staticmethod(draw_migration_story)
    num_steps = 60

    def decide(self, step: FleetStep, call: PolicyCall) -> tuple[Sequence[Move], Move | None]:
        on_tick: Sequence[Move] = ()
        if self.policy.interval_s is not None:
            on_tick = list(self.policy.moves(fleet_view(step.now, self.random, step.replicas, call)))
        # A phase change offers no draining replica except the request's own.
        own = step.request["replica"]
        offered = [replica for replica in step.replicas if replica["id"] == own or not replica["is_draining"]]
        request = request_view(step.request, call, placed=True)
        at_phase = self.policy.at_phase(request, fleet_view(step.now, self.random, offered, call))
        for move in (*on_tick, at_phase):
            if not isinstance(move, Move | None):
                raise BrokenPolicyError(f"returned {move!r}; a migration policy returns a Move")
        return on_tick, at_phase

    def check_decision(self, step: FleetStep, decision: tuple[Sequence[Move], Move | None]) -> None:
        """A move must take a placed request that is not moving yet to another replica that accepts requests."""
        on_tick, at_phase = decision
        moved: set[int] = set()
        for move in on_tick:
            self._check_move(move, step, moved)
        if at_phase is not None:
            if at_phase.request != step.request["id"]:
                raise BrokenPolicyError(f"at_phase moves request {at_phase.request}, not the one whose phase changed")
            self._check_move(at_phase, step, set())

    def _check_move(self, move: Move | None, step: FleetStep, moved: set[int]) -> None:
        """Check one move; `moved`: the requests of the tick's earlier moves."""
        placed = {one["id"]: one for replica in step.replicas for one in replica["requests"]}
        if move is None or move.request not in placed:
            raise BrokenPolicyError(f"{move!r} moves a request that is at no replica")
        request = placed[move.request]
        if move.request in moved or request["is_moving"]:
            raise BrokenPolicyError(f"{move!r} moves a request that is already being moved")
        moved.add(move.request)
        if move.target == request["replica"]:
            raise BrokenPolicyError(f"{move!r} moves a request to its own replica")
        accepting = [replica["id"] for replica in step.replicas if not replica["is_draining"]]
        if move.target not in accepting:
            raise BrokenPolicyError(f"{move!r} has a target that accepts no requests; these do: {accepting}")
        stage = move.stage_blocks
        if stage is not None and (type(stage) is not int or stage < 1):
            raise BrokenPolicyError(f"stage_blocks is {stage!r}; it must be a number of KV blocks, or None")


def states_its_interval_or_none(make: Make, seed: int) -> None:
    """`interval_s` is a number of seconds above 0, or None."""
    interval_s = getattr(make(), "interval_s", "")
    if interval_s is not None:
        check_interval(interval_s, ", or None")


class AdmissionTrial(Trial[Admission, AdmissionStep]):
    """Tests an admission policy and the requests that it holds.

    At each step some held requests are cancelled, and new requests arrive, which the policy may hold. Then the policy
    releases some held requests: each request once, to an existing tier and region.
    """

    draw_story = staticmethod(draw_admission_story)
    num_steps = 40

    def __init__(self, policy: Admission, random: Random) -> None:
        super().__init__(policy, random)
        self.held: dict[int, dict[str, Any]] = {}
        self._cancellations = Random(0)

    def continued_by(self, policy: Admission) -> AdmissionTrial:
        trial = AdmissionTrial(policy, Random(1))
        trial.held = dict(self.held)
        return trial

    def decide(self, step: AdmissionStep, call: PolicyCall) -> list[Release]:
        self.held = {id: one for id, one in self.held.items() if self._cancellations.random() >= step.cancelled_share}
        for values in step.arriving:
            arrival = PolicyCall(call.oracle)  # a separate call, because `release` may not read this view
            holds = self.policy.holds(request_view(values, arrival))
            arrival.is_over = True
            call.reads |= arrival.reads
            if type(holds) is not bool:
                raise BrokenPolicyError(f"`holds` returned {holds!r}; it must be True or False")
            if holds:
                self.held[values["id"]] = values
        view = admission_view(step.now, self.random, step.replicas, list(self.held.values()), call)
        released = list(self.policy.release(view))
        regions = {"", *(replica["region"] for replica in step.replicas)}
        for release in released:
            self._release(release, regions)
        return released

    def _release(self, release: Release, regions: set[str]) -> None:
        if not isinstance(release, Release):
            raise BrokenPolicyError(f"returned {release!r}; an admission policy returns Releases")
        if self.held.pop(release.request, None) is None:
            raise BrokenPolicyError(f"releases request {release.request!r}, which it does not hold")
        what = f"releases request {release.request}"
        if release.tier is not None and (type(release.tier) is not int or release.tier < 0):
            raise BrokenPolicyError(f"{what} as of tier {release.tier!r}; expected 0 or more")
        if release.region not in regions:
            raise BrokenPolicyError(f"{what} to region {release.region!r}, which has no replica")


def releases_every_request(make: Make, seed: int) -> None:
    """With idle replicas and enough days, all requests are released."""
    trial = AdmissionTrial(make(), Random(seed))
    steps = draw_admission_story(seed, trial.num_steps)
    for step in steps:
        trial.play(step)
    idle = [draw_replica(Random(seed), id, "idle") for id in range(2)]
    last = replace(steps[-1], arriving=[], cancelled_share=0.0, replicas=idle, ended=None)
    for day in range(10 * len(trial.held) + 10):
        trial.play(replace(last, now=last.now + day * DAY_S))
    if trial.held:
        raise BrokenPolicyError(f"holds {len(trial.held)} requests for ever, though replicas are idle")


ROUTERS = Conformance(RouterTrial, common_checks(RouterTrial))
SCALERS = Conformance(ScalerTrial, (states_its_interval, *common_checks(ScalerTrial)))
CASCADES = Conformance(CascadeTrial, common_checks(CascadeTrial))
MIGRATIONS = Conformance(MigrationTrial, (states_its_interval_or_none, *common_checks(MigrationTrial)))
ADMISSIONS = Conformance(AdmissionTrial, (states_its_interval, releases_every_request, *common_checks(AdmissionTrial)))
