"""Checks the arguments of public functions by their annotations. The error is one line that names the wrong
argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from headway.config.scenario import Scenario
from headway.core.counts import MOST_OTHER, MOST_PROCESSES, MOST_REPLICAS, MOST_SEEDS, check_count
from headway.core.errors import HeadwayError
from headway.forecast.demand import DemandForecast
from headway.planning.capacity.problem import Situation
from headway.planning.cascade.problem import JudgeError
from headway.planning.combos.problem import Offer

P = ParamSpec("P")
T = TypeVar("T")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _all(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(map(is_one, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _has_names(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


_Check = tuple[Callable[[Any], bool], str]
_GPUS: _Check = _all(lambda each: isinstance(each, str | Offer)), "a list of GPUs, as in ['h100:8:2.8']"
_SCENARIO: _Check = (
    lambda value: isinstance(value, Scenario | Mapping | str | Path),
    "a scenario, its keys or a path",
)
_CHECKS: dict[str, _Check] = {
    "ScenarioLike": _SCENARIO,
    "ScenarioLike | Sequence[ScenarioLike]": (
        lambda value: _SCENARIO[0](value) or _all(_SCENARIO[0])(value),
        f"{_SCENARIO[1]}, or a list of them",
    ),
    "Gpus": _GPUS,
    "int | Gpus": (lambda value: _is_whole(value) or _GPUS[0](value), "a number of GPUs, or a list of them"),
    "Sequence[str]": (_all(_is_text), "a list of texts"),
    "Sequence[int]": (_all(_is_whole), "a list of whole numbers"),
    "Sequence[float]": (_all(_is_number), "a list of numbers"),
    "float | Sequence[float]": (lambda value: _is_number(value) or _all(_is_number)(value), "a number, or a list"),
    "Sequence[Seconds]": (_all(lambda each: _is_number(each) or _is_text(each)), "a list of seconds or durations"),
    "Sequence[JudgeError]": (_all(lambda each: isinstance(each, JudgeError)), "a list of errors of judges"),
    "Speculative": (lambda value: value in ("on", "off", "both"), "on, off or both"),
    "Sequence[Situation]": (_all(lambda each: isinstance(each, Situation)), "a list of situations"),
    "Mapping[str, Any]": (_has_names, "keys and values"),
    "Mapping[str, Seconds]": (_has_names, "SLOs, as in {'ttft_s': 2}"),
    "Mapping[str, Sequence[Any]]": (
        lambda value: _has_names(value) and all(map(_all(lambda _: True), value.values())),
        "keys with lists of values, as in {'workload.arrivals': [10, 20]}",
    ),
    "Mapping[str, str] | Sequence[str]": (
        lambda value: (_has_names(value) and all(map(_is_text, value.values()))) or _all(_is_text)(value),
        "names of models, or a mapping to them",
    ),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (_is_text, "a text"),
    "int | str": (lambda value: _is_whole(value) or _is_text(value), "a position or a name"),
    "Demand | str | Path": (
        lambda value: isinstance(value, str | Path) or isinstance(getattr(value, "answer", None), DemandForecast),
        "a forecast, or the path of its file",
    ),
    "str | Path": (lambda value: isinstance(value, str | Path), "a path"),
    "Seconds": (lambda value: _is_number(value) or _is_text(value), "seconds, or a duration such as 450ms"),
    "float | str": (lambda value: _is_number(value) or _is_text(value), "seconds, or a duration such as 450ms"),
    "Objective": (_is_text, "a text"),
    "Ranking": (_is_text, "a text"),
}
"""Maps an annotation, without `| None`, to (test of a value, name of the expected values)."""


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Check the arguments of each call by the function's annotations. HeadwayError names the invalid argument."""
    checks = dict(checks_of(function))

    @wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            given = inspect.signature(function).bind(*arguments, **named).arguments
        except TypeError as error:
            raise HeadwayError(f"{function.__name__}: {error}") from None
        for name, (is_right, expected, may_be_none) in checks.items():
            value = given.get(name)
            if name in given and not (value is None and may_be_none) and not is_right(value):
                raise HeadwayError(f"{name}: {value!r}; expected {expected}")
        return function(*arguments, **named)

    return call


def checks_of(function: Callable[..., Any]) -> Iterable[tuple[str, tuple[Callable[[Any], bool], str, bool]]]:
    """Returns, for each checked argument, its name, its test, the name of the expected values, and whether None
    is allowed."""
    for parameter in inspect.signature(function).parameters.values():
        annotation = str(parameter.annotation)
        check = _CHECKS.get(annotation.removesuffix(" | None"))
        if check is None:  # an annotation without a check, such as Any
            continue
        is_right, expected = check
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_right = _all(is_right)
        yield parameter.name, (is_right, expected, annotation.endswith(" | None"))


_MOST = {"seeds": MOST_SEEDS, "fresh_draws": MOST_SEEDS, "jobs": MOST_PROCESSES, "max_replicas": MOST_REPLICAS}
"""Largest count by argument."""


def check_counts(least: int = 1, /, **counts: int | None) -> None:
    """Raises HeadwayError for a number below `least`, or above its argument's limit. None is ignored."""
    for name, count in counts.items():
        if count is not None:
            check_count(name, count, _MOST.get(name, MOST_OTHER), least)
