"""Arguments that nobody means: each is refused, or the policy is made and a run with it ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import headway as hw
from headway.policies import ADMISSIONS, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS, resolve

KINDS: dict[str, tuple[Mapping[str, Any], Callable[..., Any]]] = {
    "routing": (ROUTERS, resolve.router),
    "ordering": (ORDERINGS, resolve.ordering),
    "migration": (MIGRATIONS, resolve.migration),
    "admission": (ADMISSIONS, resolve.admission),
    "scaling": (SCALERS, resolve.scaler),
}
ARGUMENTS = [
    (kind, name, each.name)
    for kind, (registered, _) in KINDS.items()
    for name, made_by in registered.items()
    for each in inspect.signature(made_by).parameters.values()
    if isinstance(each.default, int | float) and not isinstance(each.default, bool)
]
DOCUMENT: dict[str, Any] = {
    "workload": {"prompt_tokens": 50, "output_tokens": 20, "arrivals": 5.0, "num_requests": 10},
    "fleet": [
        {"model": "llama-3.1-8b", "gpu": "h100", "engine": {"name": "simulated"}, "replicas": 2, "max_replicas": 3}
    ],
    "simulation": {"until_s": 5},
}


@pytest.mark.parametrize(("kind", "name", "argument"), ARGUMENTS, ids=map("-".join, ARGUMENTS))
def test_any_number_is_refused_or_taken(kind: str, name: str, argument: str) -> None:
    for value in (10**12, 10**30, 1e300, 1e-300, -1, 0):
        try:
            KINDS[kind][1]({"name": name, argument: value})
        except hw.HeadwayError:
            continue


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("routing", {"name": "freest", "num_tiers": 10**12}, "num_tiers: expected a number from 1 to 1024"),
        ("migration", {"name": "headway", "num_tiers": 10**12}, "num_tiers: expected a number from 1 to 1024"),
        ("ordering", {"name": "tiers-and-phases", "num_tiers": 10**12}, "num_tiers: expected a number from 1 to 1024"),
        ("scaling", {"name": "keda", "polling_s": 1e-300}, "expected 0.001 s or more"),
        ("admission", {"name": "queue-manager", "interval_s": 1e-9}, "expected 0.001 s or more"),
        ("routing", {"name": "dlpm", "quantum_tokens": 1e-300}, "quantum_tokens: expected a number of at least 1"),
        ("routing", {"name": "dlpm", "output_weight": 1e300}, "output_weight: expected a number from 0 to 1e"),
    ],
)
def test_what_a_run_could_not_end_with_is_refused(kind: str, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(hw.HeadwayError, match=words):
        hw.simulate({**DOCUMENT, "policies": {kind: spec}})
