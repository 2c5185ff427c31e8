"""From what a user wrote to a policy: a name, a name with arguments, or a class of the user's own.

A spec is `"least-loaded"`, or `{"name": "edf", "default_deadline_s": 30}`, or either of them with
`module:Class` for the name, where the module may lie in the current directory.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from headway.core.errors import HeadwayError, unknown
from headway.core.policy import Admission, Cascade, Migration, Ordering, Router, Scaler
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS

P = TypeVar("P", covariant=True)
Spec = str | Mapping[str, Any]
LoadModule = Callable[[str], ModuleType]
"""Imports the module of a user's class by its name."""


_TOOLS = frozenset({"desk"})
"""Arguments that no file says: where a policy has its work done."""


@dataclass(frozen=True)
class PolicyChoice(Generic[P]):
    """A policy and its arguments. Calling it makes a fresh instance, for one run."""

    name: str
    made_by: type[P]
    arguments: Mapping[str, Any]

    def __call__(self) -> P:
        return self.made_by(**self.arguments)

    @property
    def oracle(self) -> bool:
        """Whether the policy reads what only an oracle knows."""
        return bool(getattr(self.made_by, "oracle", False))

    def __str__(self) -> str:
        """As in tables: `edf`, or `edf(default_deadline_s=30)`."""
        given = ", ".join(f"{name}={_shown(value)}" for name, value in self.arguments.items() if name not in _TOOLS)
        return f"{self.name}({given})" if given else self.name


def router(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Router]:
    """The router that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Router] = _choice("router", spec, ROUTERS, load)
    _check_verb("router", choice.name, choice(), "route", ("request", "view"))
    return choice


def ordering(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Ordering]:
    """The ordering that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Ordering] = _choice("ordering", spec, ORDERINGS, load)
    made = choice()
    _check_verb("ordering", choice.name, made, "rank", ("request", "now"))
    quantum, preemptive = getattr(made, "quantum", ""), getattr(made, "preemptive", "")
    if quantum is not None and (type(quantum) is not int or quantum < 1):
        raise HeadwayError(f"ordering {choice.name}: `quantum` must be a number of tokens, or None for none")
    if type(preemptive) is not bool:
        raise HeadwayError(f"ordering {choice.name}: `preemptive` must be True or False")
    return choice


def migration(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Migration]:
    """The migration policy that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Migration] = _choice("migration", spec, MIGRATIONS, load)
    made = choice()
    _check_verb("migration", choice.name, made, "moves", ("view",))
    _check_verb("migration", choice.name, made, "at_phase", ("request", "view"))
    if getattr(made, "interval_s", "") is not None:
        _check_interval("migration", choice.name, made, ", or None for never")
    return choice


def admission(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Admission]:
    """The admission policy that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Admission] = _choice("admission", spec, ADMISSIONS, load)
    made = choice()
    _check_verb("admission", choice.name, made, "holds", ("request",))
    _check_verb("admission", choice.name, made, "release", ("view",))
    _check_interval("admission", choice.name, made, "")
    return choice


def cascade(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Cascade]:
    """The cascade policy that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Cascade] = _choice("cascade", spec, CASCADES, load)
    made = choice()
    _check_verb("cascade", choice.name, made, "enter", ("request", "view"))
    _check_verb("cascade", choice.name, made, "accept", ("request", "score", "view"))
    return choice


def scaler(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Scaler]:
    """The scaler that a spec asks for. Raises HeadwayError if it cannot be had."""
    choice: PolicyChoice[Scaler] = _choice("scaler", spec, SCALERS, load)
    made = choice()
    _check_verb("scaler", choice.name, made, "scale", ("view",))
    _check_interval("scaler", choice.name, made, "")
    return choice


def _choice(kind: str, spec: Spec, named: Mapping[str, type[P]], load: LoadModule | None) -> PolicyChoice[P]:
    given = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise HeadwayError(f"{kind}: expected a name, or `name` and arguments, got {spec!r}")
    if name in named:
        made_by: type[P] = named[name]
    elif ":" in name:
        made_by = _own(kind, name, load or _import_from_here)
    else:
        raise unknown(kind, name, named)
    where = f"{kind} {name}"
    choice = PolicyChoice(name, made_by, _arguments(where, made_by, given))
    _try_out(where, choice)
    return choice


def _try_out(where: str, choice: PolicyChoice[Any]) -> None:
    """Let the constructor refuse its arguments now rather than in the run."""
    try:
        choice()
    except HeadwayError as error:
        raise HeadwayError(f"{where}: {error}") from error
    except Exception as error:
        raise HeadwayError(f"{where}: its constructor failed: {_told(error)}") from error


def _own(kind: str, name: str, load: LoadModule) -> type[Any]:
    """A user's class, from `module:Class`."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise HeadwayError(f"{kind} {name!r}: expected module:Class")
    try:
        module = load(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise HeadwayError(f"{kind} {name}: {module_name} cannot be imported: {_told(error)}") from error
        raise HeadwayError(f"{kind} {name}: no module {error.name!r} here or among the installed packages") from None
    except Exception as error:
        raise HeadwayError(f"{kind} {name}: {module_name} cannot be imported: {_told(error)}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise unknown("class", class_name, classes, f"{kind} {module_name}")
    return found


def _import_from_here(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as for `python -m`
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _arguments(where: str, made_by: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, each converted to the type that its signature names."""
    parameters = inspect.signature(made_by).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in given:
            if name not in parameters:
                raise _unknown_argument(where, name, parameters)
    for parameter in parameters.values():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and parameter.name not in given:
            raise HeadwayError(f"{where}: needs the argument {parameter.name!r}")
    hints = _hints(made_by)
    return {name: _converted(f"{where}: {name}", value, hints.get(name, Any)) for name, value in given.items()}


def _unknown_argument(where: str, name: str, parameters: Iterable[str]) -> HeadwayError:
    if not list(parameters):
        return HeadwayError(f"{where}: takes no arguments, got {name!r}")
    return unknown("argument", name, parameters, where)


def _hints(made_by: type[Any]) -> dict[str, Any]:
    """The types of the constructor's arguments, but for those that name what does not exist at run time."""
    hints = {}
    constructor = made_by.__init__
    for name, annotation in getattr(constructor, "__annotations__", {}).items():
        one = SimpleNamespace(__annotations__={name: annotation})
        with suppress(Exception):
            hints.update(get_type_hints(one, getattr(constructor, "__globals__", {})))
    return hints


def _converted(where: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        expected = str(error).replace("`", "")
        raise HeadwayError(f"{where}: {expected[:1].lower()}{expected[1:]}: {value!r}") from None
    except TypeError:  # a type that msgspec does not know: the class must check it
        return value


def _check_verb(kind: str, name: str, made: object, verb: str, arguments: tuple[str, ...]) -> None:
    method = getattr(made, verb, None)
    shown = f"`{verb}({', '.join(arguments)})`"
    if not callable(method):
        raise HeadwayError(f"{kind} {name}: has no method {shown}")
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        raise HeadwayError(f"{kind} {name}: expected a method {shown}") from None


def _check_interval(kind: str, name: str, made: object, otherwise: str) -> None:
    interval_s: Any = getattr(made, "interval_s", None)
    if type(interval_s) not in (int, float) or not 0 < interval_s < inf:
        raise HeadwayError(f"{kind} {name}: `interval_s` must be seconds, more than 0{otherwise}")


def _told(error: Exception) -> str:
    """An exception of the user's code in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else ""
    if not at and frames:
        at = f"{frames[-1].filename}:{frames[-1].lineno}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{at}: {type(error).__name__}: {text}"


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)
