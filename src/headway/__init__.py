"""Headway: plan, rehearse and run fleets of LLM serving engines.

`import headway as hw` offers the names in `__all__`; each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

_MODULES = {
    "Comparison": "headway.api.results",
    "Demand": "headway.api.demand",
    "Engine": "headway.core.fleet",
    "Figure": "headway.api.figures",
    "Gpu": "headway.core.fleet",
    "HeadwayError": "headway.core.errors",
    "Model": "headway.core.fleet",
    "Plan": "headway.api.plans",
    "Result": "headway.api.results",
    "Scenario": "headway.config.scenario",
    "Sweep": "headway.api.results",
    "advise": "headway.api.advice",
    "compare": "headway.api.runs",
    "forecast_demand": "headway.api.demand",
    "load": "headway.api.scenarios",
    "plan_capacity": "headway.api.plans",
    "plan_cascade": "headway.api.plans",
    "plan_combos": "headway.api.plans",
    "plan_fleet": "headway.api.plans",
    "plan_goodput": "headway.api.plans",
    "plan_scaling": "headway.api.plans",
    "plan_tiers": "headway.api.plans",
    "serve": "headway.api.fleets",
    "simulate": "headway.api.runs",
    "sweep": "headway.api.runs",
    "why": "headway.api.slow_requests",
}
"""The public names, and the modules that define them."""
__all__ = list(_MODULES)  # type checkers read __init__.pyi


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
