"""`headway plan fleet`: sizes models on each type of GPU, allocates GPUs, and compares routers and tiers, all by
rehearsal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from msgspec import Struct, structs

from headway.catalog.coefficients import versions_notes
from headway.catalog.load import gpus_in
from headway.config import strict_yaml
from headway.config.fleet import model_of, own_of, profile_of
from headway.config.scenario import with_absolute_paths
from headway.config.spec import Spec
from headway.config.strict_yaml import Places
from headway.core.errors import HeadwayError
from headway.core.fleet import Model
from headway.metrics.latency import nothing_measured
from headway.metrics.seeds import Estimate, SeededMetrics, estimate_of
from headway.planning.capacity.bounds import too_long
from headway.planning.combos.problem import Offer
from headway.planning.fleet import text
from headway.planning.fleet.allocation import Parts, bound_usd, by_model, cheapest, fits, gpus, one_less, one_more, usd
from headway.planning.fleet.apart import ApartRehearsals, WholeFleet
from headway.planning.fleet.options import Chosen, Options, every
from headway.planning.fleet.problem import (
    WORTH,
    FleetPlan,
    FleetPoint,
    FleetRun,
    PointKind,
    SizedOption,
    SplitVerdict,
    TierVerdict,
)
from headway.planning.fleet.rehearsal import FleetTemplate, calibrated, prices_of, until_missed
from headway.planning.fleet.requests import FleetRequests, check_workload, names_of
from headway.planning.fleet.sizing import SizingTask
from headway.planning.rehearsals import OF_SHAPE, Rehearsals, Resources, Source, model_keys
from headway.planning.tiers.search import highest_mean
from headway.workload.table import Workload

T = TypeVar("T")
R = TypeVar("R")
ROUTINGS: tuple[str, ...] = ("least-loaded", "least-kv", "headway")
ATTAINMENT = 0.99
SEEDS, FEWER_SEEDS, FEW_REQUESTS = 5, 3, 20_000
"""Default number of seeds: the first value for at most `FEW_REQUESTS` requests, otherwise the second. It does not
depend on the speed of the machine."""
DROPPED = ("fleet", "combos", "policies", "variants", "faults", "roles", "cascade", "gateway", "provisioning",
           "gpu_limits")  # fmt: skip
"""Sections of the scenario that rehearsals of a plan ignore."""
DECAYS = (0.5, 2.0)
"""Decays of the headroom of tiers."""


class FleetOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    offers: tuple[Offer, ...]
    """The available GPUs."""
    attainment: float = ATTAINMENT
    """Required share of each model's requests that meet their SLOs."""
    tps: tuple[int, ...] = (1, 2, 4, 8)
    routings: tuple[str, ...] = ROUTINGS
    """Compared routers; models are sized with the first."""
    split: bool = True
    """Consider separate prefill and decode replicas."""
    seeds: int | None = None
    """Seeds of every completely rehearsed fleet; None: 5, or 3 for large traces."""
    coefficients: tuple[Path, ...] = ()
    """Files of step-time coefficients for the GPUs that were measured, in place of the catalog's."""


@dataclass
class FleetPlanner:
    """The steps of a plan."""

    template: FleetTemplate
    requests: FleetRequests
    options: FleetOptions
    rates: dict[str, float]
    """Requests per second of each model."""
    num_requests: dict[str, int]
    rehearsals: Rehearsals
    seeds: int = 1
    sizes: Options = field(init=False)
    apart: ApartRehearsals = field(init=False)
    notes: list[str] = field(default_factory=list)
    unservable: dict[str, str] = field(default_factory=dict)
    """As in `FleetPlan`."""

    def __post_init__(self) -> None:
        self.sizes = Options(self.rehearsals)
        self.apart = ApartRehearsals(self.template, self.rehearsals)

    def size(self) -> None:
        """Size every model as far as its cheapest GPUs need it."""
        self.sizes.begin([self._sizing(model, rate) for model, rate in self.rates.items()])

    def _sizing(self, model: str, rate: float) -> SizingTask:
        return SizingTask(
            self.template,
            model,
            rate,
            self.requests.file(model=model),
            offers=self.options.offers,
            has_split=self.options.split,
            tps=self.options.tps,
            attainment=self.options.attainment,
            routing=self.options.routings[0],
            simulator=self.rehearsals.resources.simulator,
            cache_dir=self.rehearsals.resources.cache_dir,
        )

    @property
    def num_simulated(self) -> int:
        return self.rehearsals.num_simulated + self.sizes.num_simulated

    @property
    def num_found(self) -> int:
        return self.rehearsals.num_found + self.sizes.num_found

    def cheapest(self, chosen: Chosen = every) -> tuple[Parts, str]:
        """The cheapest parts of the chosen options, which are sized as far as needed; or no parts, and the reason."""

        def settle(bounded: Sequence[SizedOption]) -> list[SizedOption]:
            self.sizes.settle(bounded)
            return self.sizes.bounds(chosen)

        return cheapest(self.sizes.bounds(chosen), self.rates, self.options.offers, self.holds, settle)

    def cheapest_split(self) -> Parts:
        """The cheapest parts with separate prefill and decode for some model; none if there are no such parts."""
        bounds_usd: dict[str, float] = {}
        for model in self.rates:
            least = bound_usd(self.sizes.bounds(_split_for(model)), self.rates, self.options.offers)
            bounds_usd |= {} if least is None else {model: least}
        exact: dict[str, Parts] = {}
        while bounds_usd:
            model = min(bounds_usd, key=lambda each: bounds_usd[each])
            if model in exact:
                return exact[model]
            exact[model], _ = self.cheapest(_split_for(model))
            if exact[model]:
                bounds_usd[model] = usd(exact[model])
            else:
                del bounds_usd[model]
        return ()

    def cheapest_of(self, gpu: str) -> Parts:
        """The cheapest parts of one type of GPU; none if there are no such parts. The model that needs the most tells
        first whether there are."""

        def chosen(each: SizedOption) -> bool:
            return not each.is_split and list(each.unit.gpus) == [gpu]

        bounded = [each for each in self.sizes.bounds(chosen) if each.at_least is not None]
        self.sizes.settle(sorted(bounded, key=lambda each: -(each.at_least or 0) * each.unit.usd_per_hour)[:1])
        return self.cheapest(chosen)[0]

    def holds(self, fleets: Sequence[Parts]) -> list[bool]:
        """As in `allocation.Holds`, with the original requests and the first router."""
        return self._hold(fleets, self.options.routings[0])

    def _hold(self, fleets: Sequence[Parts], routing: str) -> list[bool]:
        tasks = [(parts, {"routing": routing}, self.requests.file(model=parts[0].model)) for parts in fleets]
        scenarios = [self.template.scenario(*each) for each in tasks]
        found = self.rehearsals.all([until_missed(each, self.options.attainment) for each in scenarios])
        return [(each.attainment or 0.0) >= self.options.attainment for each in found]

    def point(self, kind: PointKind, label: str, parts: Parts, policies: Mapping[str, Any]) -> FleetPoint:
        """A whole fleet, rehearsed with every seed."""
        return self.points([(kind, label, parts, policies)])[0]

    def points(self, wanted: Sequence[tuple[PointKind, str, Parts, Mapping[str, Any]]]) -> list[FleetPoint]:
        """Whole fleets, each rehearsed with every seed."""
        files = [self.requests.file(i) for i in range(self.seeds)]
        runs = self.apart.runs(
            [WholeFleet(parts, policies, each) for _, _, parts, policies in wanted for each in files]
        )
        by_fleet = [tuple(runs[i : i + self.seeds]) for i in range(0, len(runs), self.seeds)]
        return [self._point(*each, own) for each, own in zip(wanted, by_fleet, strict=True)]

    def _point(
        self, kind: PointKind, label: str, parts: Parts, policies: Mapping[str, Any], runs: tuple[FleetRun, ...]
    ) -> FleetPoint:
        worst = [run.worst for run in runs]
        found = estimate_of(worst)
        return FleetPoint(
            kind,
            label,
            dict(policies),
            parts=parts,
            usd_per_hour=usd(parts),
            runs=runs,
            attainment=fmean(worst),
            interval=found and Estimate(found.mean, max(0.0, found.low), min(1.0, found.high)),
            is_met=worst[0] >= self.options.attainment,
        )

    def choose_seeds(self) -> None:
        """Choose the number of seeds for whole fleets."""
        default = SEEDS if len(self.requests.table()) <= FEW_REQUESTS else FEWER_SEEDS
        self.seeds = self.options.seeds or default

    def with_best_router(self, parts: Parts) -> tuple[FleetPoint, list[FleetPoint]]:
        """The fleet with the best router, and the same fleet with each other router.

        The best router has the highest attainment. Among routers that the seeds do not distinguish, the lowest TTFT p99
        decides, then the order.
        """
        points = self.points([("router", f"router {each}", parts, {"routing": each}) for each in self.options.routings])
        flat = tuple(
            tuple({"attainment": run.worst, "ttft_p99_s": run.ttft_p99_s} for run in each.runs) for each in points
        )
        seeded = SeededMetrics(tuple(range(self.seeds)), flat)
        left = [i for i, each in enumerate(points) if each.is_met] or list(range(len(points)))
        for key, better in (("attainment", "high"), ("ttft_p99_s", "low")):
            some = SeededMetrics(seeded.seeds, tuple(flat[i] for i in left))
            left = [i for i, verdict in zip(left, some.verdicts(key, better), strict=True) if verdict != "worse"]
        best = points[left[0]]
        return best, [each for each in points if each is not best]

    def trimmed(self, parts: Parts, routing: str) -> Parts:
        """The parts without units that the plan's router does not need, most expensive first."""
        left = True
        while left:
            left = False
            for part in sorted(parts, key=lambda each: -each.unit.usd_per_hour):
                fewer = by_model(one_less(parts, part)).get(part.model)
                if fewer and self._hold([fewer], routing)[0]:
                    parts, left = one_less(parts, part), True
                    break
        return parts

    def neighbours(self, plan: FleetPoint) -> list[FleetPoint]:
        """One unit less of each model's cheapest kind, and one unit more for the model with the lowest mean."""
        wanted: list[tuple[PointKind, str, Parts, Mapping[str, Any]]] = []
        for model, own in by_model(plan.parts).items():
            part = min(own, key=lambda each: each.unit.usd_per_hour)
            fewer = one_less(plan.parts, part)
            if model in by_model(fewer):
                wanted.append(("one less", f"one less for {model}", fewer, plan.policies))
        worst = min(self.rates, key=lambda model: fmean(run.by_model.get(model, 0.0) for run in plan.runs))
        cheapest_unit = min(by_model(plan.parts)[worst], key=lambda each: each.unit.usd_per_hour)
        more = one_more(plan.parts, cheapest_unit)
        if fits(more, self.options.offers):
            wanted.append(("one more", f"one more for {worst}", more, plan.policies))
        return self.points(wanted)

    def tiers(self, plan: FleetPoint) -> tuple[TierVerdict, FleetPoint | None]:
        """The verdict whether service tiers keep more requests in time, and the fleet with tiers."""
        num_classes = int(self.requests.table().column("tier").max(initial=0)) + 1
        if num_classes == 1:
            return TierVerdict("one class"), None
        decay, values = self._best_decay(plan, num_classes)
        gains = [value - run.worst for value, run in zip(values, plan.runs, strict=False)]
        gain = estimate_of(gains) or Estimate(gains[0], gains[0], gains[0])
        status = TierVerdict("worth it" if gain.low > 0 else "not worth it", num_classes, num_classes, gain)
        return status, self.point("tiers", f"{num_classes} tiers", plan.parts, _tiered(num_classes, decay))

    def _best_decay(self, plan: FleetPoint, num_tiers: int) -> tuple[float, tuple[float, ...]]:
        """The decay with the highest mean attainment, the first of equal ones, and its attainment with each seed.

        No model has less in time than the one that does worst: a decay's attainment is at most that of the model that
        does worst without tiers. Only a decay that may be the best is rehearsed with all models.
        """
        fleets = {
            each: [
                WholeFleet(plan.parts, _tiered(num_tiers, each), self.requests.file(i))
                for i in range(max(2, self.seeds))
            ]
            for each in DECAYS
        }
        worst = [min(run.by_model, key=lambda model: run.by_model[model]) for run in plan.runs]
        bounds = {
            each: [*self.apart.at_most(list(zip(own, worst, strict=False))), *[1.0] * (len(own) - len(worst))]
            for each, own in fleets.items()
        }
        return highest_mean(bounds, lambda each: [run.worst for run in self.apart.runs(fleets[each])])


def plan(source: Source, options: FleetOptions, resources: Resources) -> FleetPlan:
    """The cheapest fleet of the available GPUs for a scenario's requests, with the best router.

    The scenario's fleet has one pool per model, whose model and engine keys are used. Raises HeadwayError if the
    document is invalid.
    """
    with resources.requests() as folder:
        return _plan(_planner(source, options, resources, folder))


def _plan(planner: FleetPlanner) -> FleetPlan:
    options = planner.options
    parts: Parts = ()
    without: Parts = ()
    why = ""
    if not planner.unservable:
        planner.size()
        parts, why = planner.cheapest()
        without, _ = planner.cheapest(lambda each: not each.is_split)
        if not parts and not without:
            planner.sizes.settle(planner.sizes.bounds())
            parts, why = planner.cheapest()
    if without and (not parts or usd(without) <= usd(parts) * (1 + WORTH)):
        parts = without
    common = FleetPlan(
        status="short",
        sentences=(),
        target=options.attainment,
        slo=_slo(planner.template.document),
        models=planner.num_requests,
        limits={offer.gpu.name: offer.limit for offer in options.offers},
        why=why,
        unservable=planner.unservable,
    )
    if not parts:
        short = structs.replace(
            common,
            options=planner.sizes.known(),
            notes=tuple(planner.notes),
            num_simulated=planner.num_simulated,
            num_found=planner.num_found,
        )
        return structs.replace(short, sentences=text.short(short))
    return _compared(planner, common, parts, without)


def _compared(planner: FleetPlanner, common: FleetPlan, parts: Parts, without: Parts) -> FleetPlan:
    """The best plan among similar fleets, all completely rehearsed."""
    planner.choose_seeds()
    best, routers = planner.with_best_router(parts)
    fewer = planner.trimmed(parts, best.router)
    if fewer != parts:
        routers.append(structs.replace(best, kind="one more", label="before units were left out"))
        best = planner.point("plan", "the plan", fewer, best.policies)
    split, other = _split(planner, best, without)
    if other is not None and split.status == "worth it" and other.kind == "disaggregated":
        best, other = other, structs.replace(best, kind="not disaggregated", label="prefill and decode together")
    verdict, tiered = planner.tiers(best)
    others = [*routers, *([other] if other else []), *planner.neighbours(best), *_of_one_type(planner, best)]
    if tiered is not None and verdict.status == "worth it":
        others.append(structs.replace(best, kind="router", label=f"router {best.router}, without tiers"))
        best = tiered
    elif tiered is not None:
        others.append(tiered)
    marked = calibrated(planner.template, best.parts, planner.requests.file())
    chosen = structs.replace(best, kind="plan", label="the plan", parts=marked)
    found = structs.replace(
        common, status="met", policies=best.policies, parts=marked, gpus=gpus(marked), usd_per_hour=usd(marked),
        options=planner.sizes.known(), points=(chosen, *others), split=split, tiers=verdict,
        seeds=tuple(range(planner.seeds)), notes=tuple(_notes(planner, chosen)),
        num_simulated=planner.num_simulated, num_found=planner.num_found,
    )  # fmt: skip
    return structs.replace(found, sentences=text.sentences(found))


def _split(planner: FleetPlanner, best: FleetPoint, without: Parts) -> tuple[SplitVerdict, FleetPoint | None]:
    """Whether separate prefill and decode is worthwhile, and the best fleet of the other kind."""
    if not planner.options.split:
        return SplitVerdict("not tried"), None
    cost = usd(best.parts)
    if any(part.unit.aggregated is None for part in best.parts):
        if not without:
            return SplitVerdict("worth it", cost, None), None
        point = planner.point("not disaggregated", "prefill and decode together", without, best.policies)
        return SplitVerdict("worth it", cost, usd(without)), point
    dearer = planner.cheapest_split()
    if not dearer:
        return split_verdict(None, cost), None
    point = planner.point("disaggregated", "prefill and decode apart", dearer, best.policies)
    return split_verdict(usd(dearer), cost, point.is_met), point


def split_verdict(usd_split: float | None, usd_together: float, is_met: bool = True) -> SplitVerdict:
    """The verdict on separate phases. `usd_split`: price of the cheapest fleet with them; None: there is no such fleet.
    `is_met`: whether this fleet meets its target."""
    if usd_split is None:
        return SplitVerdict("impossible", None, usd_together)
    is_worth = is_met and usd_split * (1 + WORTH) < usd_together
    return SplitVerdict("worth it" if is_worth else "not worth it", usd_split, usd_together, is_met)


def _of_one_type(planner: FleetPlanner, best: FleetPoint) -> list[FleetPoint]:
    """The cheapest fleet of each single type of GPU, if the GPUs suffice and it is not the plan."""
    types = [offer.gpu.name for offer in planner.options.offers]
    wanted: list[tuple[PointKind, str, Parts, Mapping[str, Any]]] = []
    for gpu in types if len(types) > 1 else []:
        parts = () if list(gpus(best.parts)) == [gpu] else planner.cheapest_of(gpu)
        if parts:
            wanted.append(("one type", f"only {gpu}", parts, best.policies))
    return planner.points(wanted)


def _notes(planner: FleetPlanner, best: FleetPoint) -> Iterator[str]:
    yield from planner.notes
    for part in best.parts:
        if not part.calibrated:
            what = f"step times of {part.model} on {'/'.join(part.gpus)} are not calibrated"
            yield f"{what} ({', '.join(part.uncalibrated)}): trust the order, not the numbers"
    yield from text.if_longest(best.runs[0])
    if best.runs[0].is_growing:
        yield "waits still grow at the end of the requests: plan for a longer recording"
    if not best.is_met:
        yield f"with the whole fleet only {text.share(best.runs[0].worst)} of a model's requests are in time"
    if best.interval is not None and best.interval.mean < planner.options.attainment:
        what = f"with arrivals drawn anew {text.share(best.interval.mean)} are in time"
        yield f"{what}: the plan has little to spare, take one more"


def scenario_yaml(answer: FleetPlan, source: Source, options: FleetOptions) -> str:
    """The plan as a scenario that `headway simulate` and `headway serve` take. Raises HeadwayError if there is no
    plan."""
    if answer.status != "met":
        raise HeadwayError(f"no fleet to write: {answer.why}")
    document, _, base_dir = source
    template = _template(document, Places(), base_dir, options)[0]
    kept = {key: value for key, value in document.items() if key not in ("fleet", "combos", "policies", "variants")}
    whole = {**kept, **template.fleet(answer.parts, answer.policies)}
    head = "".join(f"# {line}\n" for line in answer.sentences)
    return head + strict_yaml.dump(with_absolute_paths(whole, base_dir))


def _planner(source: Source, options: FleetOptions, resources: Resources, folder: Path) -> FleetPlanner:
    document, places, base_dir = source
    if not options.offers:
        raise HeadwayError("no GPUs at hand; expected at least one")
    if len({offer.gpu.name for offer in options.offers}) < len(options.offers):
        raise HeadwayError("GPUs at hand: a type is listed twice")
    template, spec, models = _template(document, places, base_dir, options)
    with places.at("workload"):
        workload = check_workload(spec.workload)
        names = names_of(workload, spec.seed, base_dir, models)
    requests = FleetRequests(workload, base_dir, spec.seed, names, folder)
    rows = requests.table()
    own = any(name in rows.columns for name in ("slo_ttft_s", "slo_tpot_s", "slo_e2e_s", "deadline_s"))
    if not own and not _slo(template.document):
        raise HeadwayError("no SLO: give --slo ttft=SECONDS,tpot=SECONDS, or slo: in the scenario")
    span_s = max(float(rows.arrival_s[-1] - rows.arrival_s[0]), 1e-9)
    counts = {name: int((rows.columns["model"] == code).sum()) for code, name in enumerate(rows.models)}
    rates = {name: num / span_s for name, num in counts.items() if num}
    counts = {name: counts[name] for name in rates}
    planner = FleetPlanner(template, requests, options, rates, counts, Rehearsals(resources))
    planner.notes += [f"no request asks for {each.name}" for each in models if each.name not in rates]
    planner.notes += _left_out(document, planner.options)
    profiles = [profile_of(each, own_of(spec, places)) for each in spec.fleet]
    planner.notes += versions_notes((each.name, each.version) for each in profiles)
    planner.unservable = _unservable(rows, [each for each in models if each.name in rates], spec, options.attainment)
    if rows.prefix is not None and "prefix-affinity" not in options.routings:
        planner.options = structs.replace(options, routings=(*options.routings, "prefix-affinity"))
    return planner


def _unservable(rows: Workload, models: Sequence[Model], spec: Spec, attainment: float) -> dict[str, str]:
    """The models for which more requests exceed the context than may be late. Raises HeadwayError if no request
    counts."""
    found: dict[str, str] = {}
    counted, warmup_s = rows.arrival_s >= spec.simulation.warmup_s, spec.simulation.warmup_s
    for model in models:
        own = rows.columns["model"] == rows.models.index(model.name)
        if not (own & counted).any():
            raise HeadwayError(f"{model.name}: {nothing_measured(rows.arrival_s[own], warmup_s)}")
        tokens = (rows.prompt_tokens + rows.output_tokens)[own & counted]
        num = int((tokens > model.max_context_tokens).sum())
        if (len(tokens) - num) / len(tokens) < attainment:
            found[model.name] = too_long(num, len(tokens), f"its context of {model.max_context_tokens:,} tokens")
    return found


def _left_out(document: Mapping[str, Any], options: FleetOptions) -> list[str]:
    """A note if the scenario has policies of its own, which the plan does not use."""
    if not document.get("policies") and not document.get("variants"):
        return []
    routers = ", ".join(options.routings)
    return [f"the scenario's policies are left out: the plan compares the routers {routers} (--routing)"]


def _template(
    document: Mapping[str, Any], places: Places, base_dir: Path, options: FleetOptions
) -> tuple[FleetTemplate, Spec, list[Model]]:
    """The retained part of the scenario, its specification, and the models of its pools."""
    pools = document.get("fleet")
    if not isinstance(pools, list) or not pools:
        raise places.error(("fleet",), "expected a pool for each model")
    offers = options.offers
    first = offers[0].gpu.name
    any_gpu = [{**model_keys(pool, OF_SHAPE), "gpu": first} if isinstance(pool, dict) else pool for pool in pools]
    bare = {key: value for key, value in document.items() if key not in DROPPED}
    spec = strict_yaml.convert({**bare, "fleet": any_gpu}, Spec, places)
    own = own_of(spec, places)
    models: dict[str, tuple[Model, dict[str, Any]]] = {}
    for i, (pool, keys) in enumerate(zip(spec.fleet, any_gpu, strict=True)):
        model = model_of(pool, ("fleet", i), base_dir, places, own)
        models.setdefault(model.name, (model, keys))
    kept = {key: value for key, value in bare.items() if key != "workload"}
    by_name = {name: keys for name, (_, keys) in models.items()}
    template = FleetTemplate(kept, by_name, prices_of(offers), base_dir, _files_by_gpu(options))
    return template, spec, [model for model, _ in models.values()]


def _files_by_gpu(options: FleetOptions) -> dict[str, str]:
    """The file with the coefficients of each GPU at hand. Raises HeadwayError for a file without coefficients for any
    of these GPUs."""
    names = [each.gpu.name for each in options.offers]
    found: dict[str, str] = {}
    for path in options.coefficients:
        measured = [name for name in names if name in gpus_in(path)]
        if not measured:
            raise HeadwayError(f"{path}: coefficients of {', '.join(gpus_in(path))}; expected {' or '.join(names)}")
        found |= dict.fromkeys(measured, str(path.absolute()))
    return found


def _slo(document: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in (document.get("slo") or {}).items() if value is not None}


def _split_for(model: str) -> Chosen:
    """The options without those that serve this model with prefill and decode together."""
    return lambda each: each.model != model or each.is_split


def _tiered(num_tiers: int, decay: float) -> dict[str, Any]:
    """Policies that give earlier tiers reserve capacity and precedence."""
    return {
        "routing": {"name": "freest", "num_tiers": num_tiers, "decay": decay},
        "ordering": {"name": "priority", "preemptive": False},
    }
