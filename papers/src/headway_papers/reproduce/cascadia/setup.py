"""The paper's cases as scenarios: models, GPUs, traces, rates."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from headway.catalog import coefficients
from headway.catalog.coefficients import CoefficientFile, Coefficients
from headway.config import strict_yaml
from headway.config.strict_yaml import Places
from headway.planning.cascade.problem import QualityFloor
from headway.planning.cascade.request import CascadeOptions, PlanningRequest, make_request
from headway.planning.rehearsals import Source
from headway.scenario import Simulator
from headway.scenario.presets import builtin
from headway.workload.quality_traces import CASCADES, AnswerLengths

NUM_GPUS = 32
AWQ_SLOWER = 1.76
"""Slowdown of 671B with AWQ weights on 8 H100 relative to the catalog's newer kernels: 16.1 ms per token of a lone
request (vLLM in July 2025, tenstorrent/tt-inference-server issue 356) against 9.1 ms."""
ROWS = 400
"""Rows of a score table. Plans use half of them."""
ARRIVALS_S = 150.0
JUDGED_TABLES = 1000
"""First seed of the score tables on which plans are judged: no plan is made on their requests."""


def planning_case(
    cascade: str,
    trace: int,
    q_min: float,
    rate_rps: float = 20.0,
    seed: int = 0,
    lengths: AnswerLengths = "alike",
    num_gpus: int = NUM_GPUS,
) -> PlanningRequest:
    """A case of the paper on its 32 GPUs, with the 671B model slowed down by `AWQ_SLOWER`."""
    document, _ = strict_yaml.read(builtin("cascadia"))
    quality = {"trace": trace, "cascade": cascade, "num_requests": ROWS, "lengths": lengths}
    num_requests = ROWS * max(1, round(ARRIVALS_S * rate_rps / ROWS))
    document["workload"] = {"arrivals": rate_rps, "num_requests": num_requests, "quality": quality}
    document["cascade"]["models"] = list(CASCADES[cascade])
    if cascade == "llama":
        document["fleet"] = [
            {**document["fleet"][0], "name": name, "model": name, "tp": 4} for name in CASCADES["llama"]
        ]
        document["cascade"]["policy"] = {"name": "thresholds", "thresholds": [80]}
    else:
        large = document["fleet"][-1]
        large["coefficients"] = str(_file(large["gpu"], large["engine"], AWQ_SLOWER))
    target = QualityFloor(q_min)
    source = Source(document | {"seed": seed}, Places(), Path())
    return make_request(source, CascadeOptions(target=target, num_gpus=num_gpus), Simulator())


def with_fresh_requests(case: PlanningRequest, seed: int) -> PlanningRequest:
    """The case with unseen requests, which differ for each seed."""
    document = copy.deepcopy(case.document)
    document["workload"]["quality"]["seed"] = JUDGED_TABLES + seed
    return replace(case, document=document)


def changed(case: PlanningRequest, **cascade: Any) -> PlanningRequest:
    document = copy.deepcopy(case.document)
    document["cascade"] |= cascade
    return replace(case, document=document)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="headway-")


@cache
def _file(gpu: str, engine: str, times: float) -> Path:
    """A file with the catalog's coefficients slowed down by a factor."""
    catalog_entry = slowed(coefficients(gpu, engine), times)
    path = Path(_folder().name) / f"{gpu}-{engine}-{times:g}.json"
    path.write_bytes(
        msgspec.json.encode(CoefficientFile((gpu,), catalog_entry.kernels, {engine: catalog_entry.overhead}))
    )
    return path


def slowed(original: Coefficients, times: float) -> Coefficients:
    """Coefficients that multiply the time of every iteration by `times`."""
    kernels = original.kernels
    rows = {
        name: {key: _slowed(each, times) for key, each in getattr(kernels, name).items()}
        for name in ("gemm", "moe", "all_reduce")
    }
    changed = structs.replace(
        kernels,
        **rows,
        prefill_attention=_slowed(kernels.prefill_attention, times),
        decode_attention=_slowed(kernels.decode_attention, times),
        elementwise_efficiency=kernels.elementwise_efficiency / times,
    )
    experts = original.experts
    if experts is not None:
        curves = [
            structs.replace(curve, latency_us=tuple(each * times for each in curve.latency_us))
            for curve in experts.curves
        ]
        experts = structs.replace(experts, curves=tuple(curves))
    return structs.replace(original, kernels=changed, overhead=_slowed(original.overhead, times), experts=experts)


def _slowed(part: Struct, times: float) -> Any:
    changes = {}
    for name in part.__struct_fields__:
        if getattr(part, name) is None:
            continue
        if name.endswith(("_s", "_bytes_per_logit")) or "_s_per_" in name:
            changes[name] = getattr(part, name) * times
        elif name.endswith("efficiency"):
            changes[name] = getattr(part, name) / times
    return structs.replace(part, **changes)
