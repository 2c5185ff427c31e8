"""Checks of admission policies: `check_admission(MyAdmission)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from headway.core.decision import Release
from headway.core.policy import Admission
from headway.testing.stories import AdmissionStep, draw_admission_story, draw_replica
from headway.testing.strict_views import BrokenPolicyError, PolicyCall, admission_view, request_view
from headway.testing.trial import SEEDS, Check, Make, Trial, common_checks, reads_of, run_checks, states_its_interval

NUM_STEPS = 40
DAY_S = 86_400.0


def check_admission(make: Make, seeds: Iterable[int] = SEEDS) -> None:
    """Run every check of an admission policy on stories drawn with these seeds. Raises BrokenPolicyError."""
    run_checks(ADMISSION_CHECKS, make, seeds)


def admission_reads(make: Make, seeds: Iterable[int] = range(20)) -> set[str]:
    """The attributes that an admission policy reads, such as `replica.kv_blocks_used`."""
    return reads_of(AdmissionTrial, make, seeds, NUM_STEPS)


class AdmissionTrial(Trial[Admission, AdmissionStep]):
    """An admission policy, with the requests that it holds."""

    def __init__(self, policy: Admission, random: Random) -> None:
        super().__init__(policy, random)
        self.held: dict[int, dict[str, Any]] = {}
        self._cancellations = Random(0)

    @staticmethod
    def draw_story(seed: int, num_steps: int) -> Sequence[AdmissionStep]:
        return draw_admission_story(seed, num_steps)

    def continued_by(self, policy: Admission) -> AdmissionTrial:
        trial = AdmissionTrial(policy, Random(1))
        trial.held = dict(self.held)
        return trial

    def decide(self, step: AdmissionStep, call: PolicyCall) -> list[Release]:
        """Some held requests are cancelled, others arrive and are held or not; then the policy releases some."""
        self.held = {id: one for id, one in self.held.items() if self._cancellations.random() >= step.cancelled_share}
        for values in step.arriving:
            arrival = PolicyCall(call.oracle)  # of its own, as `release` may not read this view
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
        if release.tier is not None and (type(release.tier) is not int or release.tier < 0):
            raise BrokenPolicyError(
                f"releases request {release.request} as of tier {release.tier!r}; expected 0 or more"
            )
        if release.region not in regions:
            raise BrokenPolicyError(
                f"releases request {release.request} to region {release.region!r}, which has no replica"
            )


def releases_only_held_requests(make: Make, seed: int) -> None:
    """Each request is released once, to a tier and region that exist. Requests may be cancelled in between."""
    trial = AdmissionTrial(make(), Random(seed))
    for step in draw_admission_story(seed, NUM_STEPS):
        trial.play(step)


def releases_every_request(make: Make, seed: int) -> None:
    """With idle replicas and enough days, no request is held any more."""
    trial = AdmissionTrial(make(), Random(seed))
    steps = draw_admission_story(seed, NUM_STEPS)
    for step in steps:
        trial.play(step)
    idle = [draw_replica(Random(seed), id, "idle") for id in range(2)]
    last = replace(steps[-1], arriving=[], cancelled_share=0.0, replicas=idle, ended=None)
    for day in range(10 * len(trial.held) + 10):
        trial.play(replace(last, now=last.now + day * DAY_S))
    if trial.held:
        raise BrokenPolicyError(f"holds {len(trial.held)} requests for ever, though replicas are idle")


ADMISSION_CHECKS: tuple[Check, ...] = (
    states_its_interval, releases_only_held_requests, releases_every_request,
    *common_checks(AdmissionTrial, NUM_STEPS),
)  # fmt: skip
