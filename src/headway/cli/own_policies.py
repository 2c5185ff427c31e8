"""Checks users' policies with a round of the conformance kit after a run.

A run does not notice that a router reads answer lengths, or draws from a random stream without a seed. Its results
would then be better than in production, or differ from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headway.config.scenario import Scenario, listed, variants
from headway.config.user_modules import loader_of
from headway.policies import resolve
from headway.policies.resolve import LoadModule

_SEEDS = range(1)
"""One round takes a tenth of a second; `headway.testing` plays eight."""
_KINDS: dict[str, tuple[Callable[..., Any], str]] = {
    "routing": (resolve.router, "check_router"),
    "ordering": (resolve.ordering, "check_ordering"),
    "migration": (resolve.migration, "check_migration"),
    "admission": (resolve.admission, "check_admission"),
    "scaling": (resolve.scaler, "check_scaler"),
}


def broken_rules(scenario: Scenario) -> Iterator[str]:
    """A line for each user policy that breaks a rule, with the name of the check."""
    load, lines = loader_of(scenario.base_dir), dict[str, None]()
    for variant in variants(scenario):
        for kind in _KINDS:
            specs = getattr(variant.spec.policies, kind)
            for spec in listed(specs) if specs is not None else ():
                if _is_own(spec) and (rule := _broken(kind, spec, load)):
                    lines[rule] = None
    yield from lines


def _is_own(spec: Any) -> bool:
    return ":" in str(spec.get("name", "") if isinstance(spec, Mapping) else spec)


def _broken(kind: str, spec: Any, load: LoadModule) -> str:
    """The rule that the policy breaks. Other failures of the policy are reported by the run itself."""
    from headway import testing  # the kit is loaded only if there are user policies

    find, check = _KINDS[kind]
    choice = None
    try:
        choice = find(spec, load)
        getattr(testing, check)(choice, _SEEDS)
    except testing.BrokenPolicyError as error:
        return f"{kind} {choice}: {error} (headway.testing.{check})"
    except Exception:  # for example arguments that only the scenario can create, such as forecasters
        return ""
    return ""
