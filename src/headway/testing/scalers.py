"""Checks of scalers: `check_scaler(MyScaler)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from headway.core.policy import Scaler
from headway.testing.stories import PoolsStep, draw_pools_story
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, pools_view
from headway.testing.trial import SEEDS, Check, Make, Trial, common_checks, reads_of, run_checks, states_its_interval

NUM_STEPS = 30


def check_scaler(make: Make, seeds: Iterable[int] = SEEDS) -> None:
    """Run every check of a scaler on stories drawn with these seeds. Raises BrokenPolicyError."""
    run_checks(SCALER_CHECKS, make, seeds)


def scaler_reads(make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
    """The attributes that a scaler reads, such as `pool.num_starting`."""
    return reads_of(ScalerTrial, make, seeds, NUM_STEPS)


class ScalerTrial(Trial[Scaler, PoolsStep]):
    """A scaler, called once a step."""

    @staticmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[PoolsStep]:
        return draw_pools_story(seed, num_steps)

    def decide(self, step: PoolsStep, call: PolicyCall) -> dict[str, int]:
        wanted = self.policy.scale(pools_view(step.now, self.random, step.pools, step.arrived, call))
        if not isinstance(wanted, Mapping):
            raise BrokenPolicyError(f"returned {wanted!r}; a scaler returns counts by pool")
        return dict(wanted)


def stays_within_bounds(make: Make, seed: int) -> None:
    """Every count is of a pool in the view, from `min_replicas` to `max_replicas`."""
    trial = ScalerTrial(make(), Random(seed))
    for step in draw_pools_story(seed, NUM_STEPS):
        bounds = {pool["name"]: (pool["min_replicas"], pool["max_replicas"]) for pool in step.pools}
        for name, count in trial.play(step).items():
            if name not in bounds:
                raise BrokenPolicyError(f"scales pool {name!r}; the view has {sorted(bounds)}")
            low, high = bounds[name]
            if type(count) is not int or not low <= count <= high:
                raise BrokenPolicyError(f"wants {count!r} replicas in pool {name!r}; it may have {low} to {high}")


SCALER_CHECKS: tuple[Check, ...] = (states_its_interval, stays_within_bounds, *common_checks(ScalerTrial, NUM_STEPS))
