"""The arguments of a policy's constructor as a search space, and points drawn from it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from math import exp, isfinite, log
from random import Random
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from headway.core.errors import HeadwayError, unknown
from headway.policies.resolve import PolicyChoice

REACH = 8.0
"""A number is drawn from its default divided by this to its default times this."""

Value = float | int | bool | str


class Argument(Struct, frozen=True):
    """One argument of a constructor."""

    name: str
    is_whole: bool = False
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Value, ...] = ()
    """Possible values, in place of `low` and `high`."""

    def draw(self, random: Random) -> Value:
        """One of the choices, or a uniform draw: on a logarithmic scale if `low` is positive."""
        if self.choices:
            return random.choice(self.choices)
        value = random.uniform(self.low, self.high)
        if self.low > 0:
            value = exp(random.uniform(log(self.low), log(self.high)))
        return round(value) if self.is_whole else float(f"{value:.3g}")


def space(choice: PolicyChoice[Any], vary: Sequence[str] = ()) -> tuple[Argument, ...]:
    """The arguments in `vary`, given as `name`, `name=low:high` or `name=a,b,c`; without any, all with a range.

    The default determines the range of a number, the type the choices of a flag or a literal. Raises HeadwayError for
    an unknown argument, for one without a range, and if no argument can vary.
    """
    parameters = inspect.signature(choice.made_by).parameters
    hints = get_type_hints(choice.made_by.__init__)
    if not vary:
        found = [_by_default(name, each.default, hints.get(name)) for name, each in parameters.items()]
        kept = tuple(each for each in found if each is not None)
        if not kept:
            raise HeadwayError(f"{choice.name}: no argument with a range to search; expected --vary NAME=LOW:HIGH")
        return kept
    return tuple(_argument(choice.name, text, parameters, hints) for text in vary)


def _argument(policy: str, text: str, parameters: Any, hints: dict[str, Any]) -> Argument:
    name, _, values = text.partition("=")
    if name not in parameters:
        raise unknown("argument", name, parameters, f"--vary: {policy}")
    default = parameters[name].default
    if not values:
        argument = _by_default(name, default, hints.get(name))
        if argument is None:
            raise HeadwayError(f"--vary {name}: has no range of its own; expected {name}=LOW:HIGH or {name}=A,B,C")
        return argument
    if ":" not in values:
        return Argument(name, choices=tuple(_value(each) for each in values.split(",")))
    low, high = (_value(each) for each in values.split(":", 1))
    if isinstance(low, str) or isinstance(high, str) or not low < high:
        raise HeadwayError(f"--vary {text}: expected two numbers, the lower one first")
    return Argument(name, isinstance(low, int) and isinstance(high, int) and _is_whole(hints.get(name)), low, high)


def _by_default(name: str, default: Any, hint: Any) -> Argument | None:
    choices = _literals(hint)
    if choices:
        return Argument(name, choices=choices)
    if type(default) is bool:
        return Argument(name, choices=(False, True))
    if type(default) not in (int, float) or not isfinite(default) or default < 0:
        return None
    is_whole = _is_whole(hint)
    if default == 0:
        return Argument(name, is_whole, 0.0, 1.0)
    low = default / REACH
    return Argument(name, is_whole, max(low, 1.0) if is_whole else low, default * REACH)


def _literals(hint: Any) -> tuple[Value, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for each in get_args(hint) if each is not NoneType for value in _literals(each))
    return ()


def _is_whole(hint: Any) -> bool:
    """Whether an annotation means a whole number or None."""
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    return int in kinds and float not in kinds


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
