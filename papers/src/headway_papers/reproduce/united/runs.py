"""The five presets with Headway's policies and with the paper's, and the measurements of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from headway.config import strict_yaml
from headway.metrics.latency import Distribution
from headway.report.run import Run
from headway.scenario.presets import builtin

PRESET = {"preset": "headway"}
PARTS: Mapping[str, tuple[str, str]] = {
    "pascal": ("PASCAL", "the paper's fleet"),
    "ktier burst": ("K-tier Llumnix", "a burst"),
    "ktier steady": ("K-tier Llumnix", "150 requests/s"),
    "cauchy": ("Cauchy", "three unlike combos at 55 requests/s"),
    "sageserve": ("SageServe", "regions under LT-UA"),
    "cascadia": ("Cascadia", "the fleet for trace 1"),
    "all": ("All at once", "the concerns of all five systems"),
}
"""Maps each part to the system, and the basis of the comparison."""
QUICK = 4
"""--quick divides the number of requests, or the rate, by this."""


def documents(part: str, quick: bool) -> Mapping[str, dict[str, Any]]:
    """Scenarios by name: "headway" and the ones compared with it."""
    by_name = _full_documents(part)
    return {name: _quick(document) for name, document in by_name.items()} if quick else by_name


def _full_documents(part: str) -> Mapping[str, dict[str, Any]]:
    if part == "pascal":
        own = _variant("pascal", "pascal")
        return {"headway": _preset_on(own), "pascal": own}
    if part.startswith("ktier"):
        own = _variant("ktier", "k-tier")
        own = _workload(own, arrivals=1250 if part == "ktier burst" else 150)
        return {"headway": _preset_on(own), "k-tier": own}
    if part == "cauchy":
        own = _workload(_variant("cauchy", "cauchy"), arrivals=55)
        return {"headway": _preset_on(own), "cauchy": own}
    if part == "sageserve":
        own = _variant("sageserve", "LT-UA")
        return {"headway": _preset_on(own), "sageserve": own}
    if part == "cascadia":
        own = _with_policies(_preset("cascadia"), {"routing": "least-loaded"})
        return {"headway": _preset_on(own), "least loaded": own}
    return {name: _variant("headway", name) for name in _names("headway")}


@cache
def _read(name: str) -> Mapping[str, Any]:
    document, _ = strict_yaml.read(builtin(name))
    return document


def _preset(name: str) -> dict[str, Any]:
    return {key: value for key, value in _read(name).items() if key not in ("variants", "seed")}


def _names(preset: str) -> list[str]:
    return [each["name"] for each in _read(preset)["variants"]]


def _variant(preset: str, name: str) -> dict[str, Any]:
    """The preset with the policies of one of its variants."""
    variant = next(each for each in _read(preset)["variants"] if each["name"] == name)
    return _with_policies(_preset(preset), {key: value for key, value in variant.items() if key != "name"})


def _with_policies(document: Mapping[str, Any], policies: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "policies": {**document.get("policies", {}), **policies}}


def _preset_on(document: Mapping[str, Any]) -> dict[str, Any]:
    """The fleet and workload with only the preset's policies."""
    return {**document, "policies": PRESET}


def _workload(document: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {**document, "workload": {**document["workload"], **fields}}


def _quick(document: Mapping[str, Any]) -> dict[str, Any]:
    workload = dict(document["workload"])
    if "num_requests" in workload:
        workload["num_requests"] //= QUICK
    elif "scale" in workload:
        workload["scale"] /= QUICK
    else:
        rates = [rate / QUICK for rate in workload["arrivals"]["rates"]]
        workload["arrivals"] = {**workload["arrivals"], "rates": rates}
    return {**document, "workload": workload}


def measure(run: Run) -> dict[str, Any]:
    """Latencies, SLOs and cost, of all requests and of tier 0."""
    summary, first = run.summary, run.summary.tiers.get("0")
    return {
        "ttft_p99_s": _p(summary.ttft_s, "p99"),
        "answer_p99_s": _p(summary.answer_s, "p99"),
        "behind": summary.qoe_violations,
        "e2e_mean_s": _p(summary.e2e_s, "mean"),
        "e2e_p95_s": _p(summary.e2e_s, "p95"),
        "slo": summary.slo_attainment,
        "moves": summary.moves,
        "gpu_hours": summary.gpu_hours,
        "usd": summary.usd,
        "tier0_slo": first.slo_attainment if first else None,
        "tier0_ttft_p99_s": _p(first.ttft_s, "p99") if first else None,
    }


def _p(values: Distribution | None, which: str) -> float | None:
    return None if values is None else float(getattr(values, which))
