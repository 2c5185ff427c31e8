"""Checks of routers: `check_router(MyRouter)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from headway.core.decision import Placement
from headway.core.policy import Router
from headway.testing.stories import FleetStep, draw_story
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, fleet_view, request_view
from headway.testing.trial import SEEDS, Check, Make, Trial, common_checks, reads_of, run_checks

NUM_STEPS = 60


def check_router(make: Make, seeds: Iterable[int] = SEEDS) -> None:
    """Run every check of a router on stories drawn with these seeds. Raises BrokenPolicyError."""
    run_checks(ROUTER_CHECKS, make, seeds)


def router_reads(make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
    """The attributes that a router reads, such as `replica.num_waiting`."""
    return reads_of(RouterTrial, make, seeds, NUM_STEPS)


class RouterTrial(Trial[Router, FleetStep]):
    """A router, called once a step."""

    @staticmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[FleetStep]:
        return draw_story(seed, num_steps)

    def decide(self, step: FleetStep, call: PolicyCall) -> Placement:
        view = fleet_view(step.now, self.random, step.replicas, call)
        placement = self.policy.route(request_view(step.request, call), view)
        if not isinstance(placement, Placement):
            raise BrokenPolicyError(f"returned {placement!r}; a router returns a Placement")
        return placement


def chooses_an_offered_replica(make: Make, seed: int) -> None:
    """The placement is a replica of the view, and its decode replica is one of the same combo.

    Views have one replica or many, replicas vanish and return, and loads are unknown or absurd. Only a router with
    `pairs = True` may name a decode replica.
    """
    trial = RouterTrial(make(), Random(seed))
    pairs = bool(getattr(trial.policy, "pairs", False))
    for step in draw_story(seed, NUM_STEPS):
        placement = trial.play(step)
        chosen, decode = placement.replica, placement.decode
        combos = {replica["id"]: replica["combo"] for replica in step.replicas}
        if chosen not in combos:
            raise BrokenPolicyError(f"chose replica {chosen!r}; it was offered {sorted(combos)}")
        if decode is None:
            continue
        if not pairs:
            raise BrokenPolicyError(f"decodes at replica {decode!r}; only a router with `pairs = True` may say where")
        if combos.get(decode) != combos[chosen]:
            own = sorted(id for id, combo in combos.items() if combo == combos[chosen])
            raise BrokenPolicyError(f"decodes at replica {decode!r}; the chosen combo has the replicas {own}")


ROUTER_CHECKS: tuple[Check, ...] = (chooses_an_offered_replica, *common_checks(RouterTrial, NUM_STEPS))
