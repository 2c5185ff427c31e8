"""Measures the goodputs of a fleet's combos again, with the requests that the fleet received.

A goodput is valid for one mix of prompts and answers, and a service's mix changes over time. Routing weighs combos by
their goodput, and Algorithm 1 relies on it. The recorded requests of a gateway are therefore simulated on one combo of
each kind at increasing rates, and the highest rate served in time replaces `goodput_rps` in the fleet file. A gateway
that serves the file reloads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from headway.config.scenario import assemble
from headway.core.errors import HeadwayError
from headway.core.fleet import Combo
from headway.planning.combos.plan import service_scenario
from headway.planning.combos.problem import GpuCombo, Group
from headway.planning.combos.rehearsal import ATTAINMENT, MOST_REQUESTS, GoodputProfiler
from headway.planning.planned import Planned
from headway.planning.rehearsals import Rehearsals, Resources, Source
from headway.report.blocks import Table, or_dash
from headway.workload.read import read


class Reprofiled(Struct, frozen=True, forbid_unknown_fields=True):
    combo: str
    label: str
    before_rps: float | None
    """Value in the file; None if it has none."""
    goodput_rps: float
    """Goodput of one combo with the recorded requests; 0 if no rate is served in time."""


class ReprofileAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    combos: tuple[Reprofiled, ...]
    num_requests: int
    """Recorded requests whose lengths were used."""
    prompt_tokens: float
    """Mean prompt tokens."""
    output_tokens: float
    """Mean output tokens."""
    num_simulated: int
    num_found: int


class ReprofileOptions(Struct, frozen=True, forbid_unknown_fields=True):
    attainment: float = ATTAINMENT
    """Share of requests in time at which a rate counts as served."""
    num_requests: int = MOST_REQUESTS
    """Maximum requests of one simulation of a short profile; the final ones have four times as many."""


def planned(source: Source, text: str, requests: Path, options: ReprofileOptions, resources: Resources) -> Planned:
    """The goodputs of a fleet's combos, measured again: `headway plan goodput`. Raises HeadwayError like `reprofile`.

    `text`: the text of the fleet file, which is written back with the new goodputs.
    """
    answer = reprofile(source, requests, options, resources)
    rows = [
        [
            each.combo,
            each.label,
            or_dash(each.before_rps, "{:.4g}"),
            f"{each.goodput_rps:.4g}",
        ]
        for each in answer.combos
    ]
    means = f"{answer.prompt_tokens:.0f} prompt and {answer.output_tokens:.0f} output tokens"
    counted = f"{answer.num_requests:,} requests of {means} in the mean"
    return Planned(
        answer,
        all(each.goodput_rps > 0 for each in answer.combos),
        tuple(msgspec.to_builtins(each) for each in answer.combos),
        (counted,),
        (Table(("combo", "", "goodput/s before", "now"), rows, words=("combo", "")), counted),
        {"": lambda: with_goodputs(text, answer)},
    )


def reprofile(source: Source, requests: Path, options: ReprofileOptions, resources: Resources) -> ReprofileAnswer:
    """Measure the goodput of every combo of a fleet file. `requests`: records of the gateway, or any trace.

    Raises HeadwayError if the file has no combos, combos of several models, or no SLO.
    """
    document, places, base_dir = source
    fleet = assemble(dict(document), places, base_dir).fleet
    if not fleet.combos:
        raise places.error(("combos",), "expected combos, whose goodputs are to be measured")
    models = {part.model.name for combo in fleet.combos for part in combo.parts}
    if len(models) > 1:
        raise places.error(("combos",), f"expected combos of one model, got {', '.join(sorted(models))}")
    mean_rps = _mean_rps(requests)
    first = deepcopy(document["combos"][0])
    part = first.get("aggregated") or first["prefill"]
    pool = {key: value for key, value in part.items() if key not in ("endpoints", "processes", "kubernetes", "slots")}
    contents = {
        **{key: value for key, value in document.items() if key not in ("combos", "policies", "gateway")},
        "name": str(document.get("name", "fleet")),
        "workload": {"trace": {"path": str(requests.absolute())}, "arrivals": mean_rps},
        "fleet": [pool],
    }
    if "handover" in first:
        contents["handover"] = first["handover"]
    service = service_scenario(Source(contents, places, base_dir), resources.simulator)
    rehearsals = Rehearsals(resources, remembers=True)
    profiler = GoodputProfiler({service.service.name: service}, rehearsals, options.attainment, options.num_requests)
    pattern, slo = service.service.pattern, service.service.slo
    found = tuple(
        Reprofiled(each.name, shape.label, each.goodput_rps, profiler.lasting_rps(shape, pattern, slo))
        for each in fleet.combos
        for shape in (shape_of(each),)
    )
    return ReprofileAnswer(
        found,
        service.most_requests or 0,
        pattern.prompt_tokens,
        pattern.output_tokens,
        rehearsals.num_simulated,
        rehearsals.num_found,
    )


def _mean_rps(requests: Path) -> float:
    arrival_s = read(requests).arrival_s
    span_s = float(arrival_s[-1] - arrival_s[0]) if len(arrival_s) else 0.0
    if span_s <= 0:
        raise HeadwayError(f"{requests}: expected several requests, at different times")
    return (len(arrival_s) - 1) / span_s


def shape_of(combo: Combo) -> GpuCombo:
    """A fleet's combo in the planner's representation."""
    groups = [Group(part.gpu.name, part.parallel.tp, part.replicas) for part in combo.parts]
    usd = sum(part.usd_per_hour * part.replicas for part in combo.parts)
    model = combo.parts[0].model.name
    if len(groups) == 1:
        return GpuCombo(model, usd, aggregated=groups[0])
    return GpuCombo(model, usd, prefill=groups[0], decode=groups[1])


def with_goodputs(text: str, answer: ReprofileAnswer) -> str:
    """The text of the fleet file with the new goodputs; everything else, including comments, is unchanged.

    A combo that serves no rate in time keeps its old goodput.
    """
    rates = {each.combo: f"{each.goodput_rps:.4g}" for each in answer.combos if each.goodput_rps > 0}
    changes: list[tuple[int, int, str]] = []
    for combo in _section(yaml.compose(text, Loader=yaml.SafeLoader)):
        keys = {key.value: (key, value) for key, value in combo.value}
        name_key, name = keys["name"]
        if name.value not in rates:
            continue
        if "goodput_rps" in keys:
            _, old = keys["goodput_rps"]
            changes.append((old.start_mark.index, old.end_mark.index, rates[name.value]))
        else:
            before = ", " if combo.flow_style else "\n" + " " * name_key.start_mark.column
            changes.append((name.end_mark.index, name.end_mark.index, f"{before}goodput_rps: {rates[name.value]}"))
    for start, end, new in sorted(changes, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _section(root: yaml.Node | None) -> Iterator[yaml.MappingNode]:
    """The entries of the scenario's section `combos`."""
    assert isinstance(root, yaml.MappingNode)
    for key, value in root.value:
        if key.value == "combos":
            yield from value.value
