"""GPU combos: which GPUs prefill and which decode, in which counts and shapes (Cauchy 3.1, 3.3.1, 3.3.2).

A combo is the unit that is deployed: so many GPUs of one type to prefill and so many of one type to decode, or so
many of one type that do both. GPUs of a phase form instances with the highest tensor parallelism that a server holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from msgspec import Struct

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf import memory


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Like GPUs as `instances` replicas of `tp` GPUs each."""

    gpu: str
    tp: int = 1
    instances: int = 1

    @property
    def num_gpus(self) -> int:
        """Of all instances."""
        return self.tp * self.instances

    @property
    def label(self) -> str:
        """As in "4 x h20-96gb (tp 2)"."""
        return f"{self.num_gpus} x {self.gpu}" + (f" (tp {self.tp})" if self.tp > 1 else "")


class GpuCombo(Struct, frozen=True, forbid_unknown_fields=True):
    """Either `prefill` and `decode`, or `aggregated`; prices of the whole combo."""

    model: str
    usd_per_hour: float
    """Of an hour in which it serves: what interruptions cost is part of it, see `usd_per_hour`."""
    prefill: Group | None = None
    decode: Group | None = None
    aggregated: Group | None = None

    def __post_init__(self) -> None:
        if (self.prefill is None) != (self.decode is None) or (self.prefill is None) == (self.aggregated is None):
            raise ValueError("a combo has prefill and decode, or aggregated")
        if not 0 <= self.usd_per_hour < float("inf"):
            raise ValueError(f"usd_per_hour: {self.usd_per_hour}; expected 0 or more")

    @property
    def groups(self) -> tuple[Group, ...]:
        """Its one or two groups of GPUs."""
        return tuple(group for group in (self.prefill, self.decode, self.aggregated) if group is not None)

    @property
    def gpus(self) -> dict[str, int]:
        """GPUs by type."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.gpu] = found.get(group.gpu, 0) + group.num_gpus
        return found

    @property
    def phases(self) -> tuple[Group, Group]:
        """Who prefills and who decodes."""
        if self.aggregated is not None:
            return self.aggregated, self.aggregated
        assert self.prefill is not None and self.decode is not None
        return self.prefill, self.decode

    @property
    def label(self) -> str:
        """As in "<2 x h800-80gb-sxm (tp 2), 4 x h20-96gb (tp 2)>"."""
        return f"<{', '.join(group.label for group in self.groups)}>"


RESTART_S = 90.0
"""Until a new instance serves (Cauchy 3.5.1)."""


class Offer(Struct, frozen=True, forbid_unknown_fields=True):
    """GPUs of one type that can be had."""

    gpu: Gpu
    limit: int | None = None
    """None: as many as one wants."""
    usd_per_hour: float | None = None
    """Of one GPU; None: the catalog's."""
    gpus_per_server: int | None = None
    """The most that one instance may span; None: the catalog's node."""
    interruptions_per_hour: float = 0.0
    """Of one instance, by the provider, as of spot GPUs."""
    restart_s: float = RESTART_S
    """Paid for after an interruption until the combo serves again."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"limit: {self.limit}; expected 0 or more")
        if not 0 <= self.price < float("inf"):
            raise ValueError(f"usd_per_hour: {self.price}; expected 0 or more")
        for field in ("interruptions_per_hour", "restart_s"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field}: {getattr(self, field)}; expected 0 or more")
        if self.gpus_per_server is not None and self.gpus_per_server < 1:
            raise ValueError(f"gpus_per_server: {self.gpus_per_server}; expected 1 or more")

    @property
    def price(self) -> float:
        """Of one GPU and hour."""
        return self.gpu.usd_per_hour if self.usd_per_hour is None else self.usd_per_hour

    @property
    def server(self) -> int:
        """GPUs that one instance may span."""
        return self.gpu.gpus_per_node if self.gpus_per_server is None else self.gpus_per_server


class Counts(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes that are tried: 1:1 to 2:6 as in 3.3.2."""

    prefill: tuple[int, ...] = (1, 2)
    decode: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    aggregated: tuple[int, ...] = (1, 2, 4)
    same_type: bool = True
    """Whether prefill and decode may be of one type, apart from each other."""

    def __post_init__(self) -> None:
        if min((*self.prefill, *self.decode, *self.aggregated), default=1) < 1:
            raise ValueError("counts: expected 1 or more")


class Rejected(Struct, frozen=True, forbid_unknown_fields=True):
    """What is not among the candidates, and why."""

    what: str
    reason: str


def group(model: Model, engine: Engine, offer: Offer, num_gpus: int) -> Group:
    """So many GPUs in as few instances as they make. HeadwayError where the model fits in none of the shapes."""
    if offer.limit is not None and num_gpus > offer.limit:
        raise HeadwayError(f"{num_gpus} x {offer.gpu.name}: there are {offer.limit}")
    shapes = [tp for tp in range(min(num_gpus, offer.server), 0, -1) if num_gpus % tp == 0]
    reason: HeadwayError | None = None
    for tp in shapes:
        try:
            memory.plan(model, offer.gpu, engine, Parallel(tp))
        except HeadwayError as error:
            reason = reason or error
        else:
            return Group(offer.gpu.name, tp, num_gpus // tp)
    raise HeadwayError(f"{num_gpus} x {offer.gpu.name}: {reason}")


def combos(
    model: Model, engine: Engine, offers: Sequence[Offer], counts: Counts | None = None
) -> tuple[tuple[GpuCombo, ...], tuple[Rejected, ...]]:
    """Every combo of these GPUs that holds the model and is within the limits; and what is not, with reasons."""
    counts = counts or Counts()
    by_type = {offer.gpu.name: offer for offer in offers}
    if len(by_type) < len(offers):
        raise HeadwayError("offers: a GPU type stands there twice")
    rejected: dict[str, str] = {}
    groups: dict[tuple[str, int], Group] = {}
    for offer, num in product(offers, sorted({*counts.prefill, *counts.decode, *counts.aggregated})):
        try:
            groups[offer.gpu.name, num] = group(model, engine, offer, num)
        except HeadwayError as error:
            rejected[f"{num} x {offer.gpu.name}"] = str(error)
    limits = {offer.gpu.name: offer.limit for offer in offers}
    found = []
    for combo in _made(model.name, groups, by_type, counts):
        if _within(combo.gpus, limits):
            found.append(combo)
        else:
            rejected[combo.label] = "more GPUs of a type than there are"
    return tuple(found), tuple(Rejected(what, why) for what, why in rejected.items())


def usd_per_hour(groups: Sequence[Group], offers: Mapping[str, Offer]) -> float:
    """What a combo costs for each hour in which it serves.

    It serves with all of its instances, so each one's interruption stops it, and all of its GPUs are paid for until
    it is whole again: with R interruptions an hour in all, each of s seconds, price * (1 + R s / 3600).
    """
    price = sum(group.num_gpus * offers[group.gpu].price for group in groups)
    lost_s = sum(group.instances * offers[group.gpu].interruptions_per_hour * offers[group.gpu].restart_s
                 for group in groups)  # fmt: skip
    return price * (1 + lost_s / 3600)


def _made(
    model: str, groups: Mapping[tuple[str, int], Group], offers: Mapping[str, Offer], counts: Counts
) -> Iterator[GpuCombo]:
    for first, second in product(offers, offers):
        if first == second and not counts.same_type:
            continue
        for num_first, num_second in product(counts.prefill, counts.decode):
            prefill, decode = groups.get((first, num_first)), groups.get((second, num_second))
            if prefill is not None and decode is not None:
                yield GpuCombo(model, usd_per_hour((prefill, decode), offers), prefill=prefill, decode=decode)
    for gpu, num in product(offers, counts.aggregated):
        if (gpu, num) in groups:
            alone = groups[gpu, num]
            yield GpuCombo(model, usd_per_hour((alone,), offers), aggregated=alone)


def _within(gpus: dict[str, int], limits: dict[str, int | None]) -> bool:
    return all((most := limits[gpu]) is None or num <= most for gpu, num in gpus.items())


def better_directions(
    found: Iterable[GpuCombo], efficiency: Callable[[GpuCombo], float | None]
) -> tuple[tuple[GpuCombo, ...], tuple[Rejected, ...]]:
    """The Pareto filter of 3.3.1: of each pair of types, only the direction that has the higher CE at its best.

    Counts stay as they are: every size of the better direction is kept. An `efficiency` of None is infinite.
    """
    found = tuple(found)
    best: dict[tuple[str, str], float] = {}
    for combo in found:
        value = efficiency(combo)
        pair = (combo.phases[0].gpu, combo.phases[1].gpu)
        best[pair] = max(best.get(pair, 0.0), float("inf") if value is None else value)
    kept, rejected = [], []
    for combo in found:
        pair = (combo.phases[0].gpu, combo.phases[1].gpu)
        reverse = (pair[1], pair[0])
        other = best.get(reverse, -1.0)
        if combo.aggregated is None and (other > best[pair] or (other == best[pair] and reverse < pair)):
            rejected.append(Rejected(combo.label, f"{pair[1]} to {pair[0]} has the higher cost-efficiency"))
        else:
            kept.append(combo)
    return tuple(kept), tuple(rejected)
