"""What scaling cost besides serving: GPUs that stood by while replicas started, and what was given away."""

from __future__ import annotations

from msgspec import Struct

from headway.core.record import Records, ReplicaRecord

INITIAL = "initial"


class Waste(Struct, frozen=True):
    """GPU hours paid for while replicas started, by where those came from (SageServe, sections 2.3 and 7.2.4)."""

    new: float
    reclaimed: float
    redeployed: float


class Provisioned(Struct, frozen=True):
    """Of a run in which replicas came or went."""

    starts: int
    starting_gpu_hours: Waste
    spot_gpu_hours: float
    """From giving a replica back to taking it back, or to the end of the run."""


def provisioned(records: Records, warmup_s: float) -> Provisioned | None:
    """From `warmup_s` to the end of the run; None where the fleet stayed as it was."""
    replicas = records.replicas
    if all(each.origin == INITIAL and _gone_s(each, records.end_s) is None for each in replicas):
        return None
    window = (warmup_s, records.end_s)
    waste = dict.fromkeys(Waste.__struct_fields__, 0.0)
    for each in replicas:
        if each.origin != INITIAL:
            waste[each.origin] += each.num_gpus * _starting_hours(each, window)
    taken_s = {each.replaces: each.up[0][0] for each in replicas if each.replaces >= 0}
    spot = 0.0
    for each in replicas:
        gone_s = _gone_s(each, records.end_s)
        if gone_s is not None:
            spot += each.num_gpus * _hours((gone_s, taken_s.get(each.id, records.end_s)), window)
    starts = sum(each.origin != INITIAL and each.up[0][0] >= warmup_s for each in replicas)
    return Provisioned(starts, Waste(**waste), spot)


def _gone_s(replica: ReplicaRecord, end_s: float) -> float | None:
    """When it was given back."""
    return replica.up[-1][1] if replica.up[-1][1] < end_s else None


def _starting_hours(replica: ReplicaRecord, window: tuple[float, float]) -> float:
    """The first time that it was down, right from its beginning; later ones are crashes."""
    began_s = replica.up[0][0]
    return sum(_hours(down, window) for down in replica.down[:1] if down[0] == began_s)


def _hours(interval: tuple[float, float], window: tuple[float, float]) -> float:
    return max(min(interval[1], window[1]) - max(interval[0], window[0]), 0.0) / 3600
