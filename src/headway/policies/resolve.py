"""Turns a user's specification into a policy: a name, a name with arguments, or a user's class.

A specification is `"least-loaded"`, or `{"name": "edf", "default_deadline_s": 30}`, or either with `module:Class` as
the name. In Python, the name may also be the class itself, or an instance, which every run copies. Without a `load`
function, modules are imported from the current directory or `sys.path`.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from types import FunctionType, MethodDescriptorType, ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from headway.core.errors import HeadwayError, mismatch, unknown
from headway.core.policy import Admission, Cascade, MakeRouter, Migration, Ordering, Router, Scaler
from headway.policies import ADMISSIONS, CASCADES, MIGRATIONS, ORDERINGS, ROUTERS, SCALERS
from headway.policies.arguments import LEAST_INTERVAL_S
from headway.policies.guard import guarded

P = TypeVar("P", covariant=True)
Spec = str | Mapping[str, Any]
LoadModule = Callable[[str], ModuleType]
"""Imports the module of a user's class by its name."""


_HIDDEN = frozenset({"tasks"})
"""Arguments that files cannot set and tables do not show: how a policy runs background work."""


@dataclass(frozen=True)
class PolicyChoice(Generic[P]):
    """A policy and its arguments. Calling it creates a new instance for one run."""

    name: str
    made_by: type[P]
    arguments: Mapping[str, Any]
    guarded_verbs: tuple[str, ...] = ()
    """Guarded methods of a user's policy: they must not change their arguments."""

    def __call__(self) -> P:
        policy = self.made_by(**self.arguments)
        return guarded(policy, self.guarded_verbs) if self.guarded_verbs else policy

    @property
    def oracle(self) -> bool:
        return bool(getattr(self.made_by, "oracle", False))

    def __str__(self) -> str:
        """The policy in tables' notation: `edf`, or `edf(default_deadline_s=30)`. Default arguments are left out."""
        defaults = {each.name: each.default for each in inspect.signature(self.made_by).parameters.values()}
        shown = [
            f"{name}={_text(value)}"
            for name, value in self.arguments.items()
            if name not in _HIDDEN and not _same(value, defaults.get(name, inspect.Parameter.empty))
        ]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def identity(choice: Callable[[], object]) -> str:
    """A text that identifies a policy and its arguments, in whatever order they are given. A gateway and an engine
    compare their policies by this text."""
    if isinstance(choice, PolicyChoice):
        choice = replace(choice, arguments=dict(sorted(choice.arguments.items())))
    return str(choice)


@dataclass(frozen=True)
class InstanceChoice(PolicyChoice[P]):
    """An instance that a program provided. Calling it copies the instance."""

    instance: Any = None

    def __call__(self) -> P:
        return guarded(copy.deepcopy(self.instance), self.guarded_verbs)  # type: ignore[no-any-return]


Verbs = Mapping[str, tuple[str, ...]]
"""The methods that a kind of policy must have, with their arguments."""


def router(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Router]:
    """Resolve a router. Raises HeadwayError, as all functions here."""
    return _resolved("router", spec, ROUTERS, load, {"route": ("request", "view")})[0]


def ordering(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Ordering]:
    choice, policy = _resolved("ordering", spec, ORDERINGS, load, {"rank": ("request", "now")})
    quantum, preemptive = getattr(policy, "quantum", ""), getattr(policy, "preemptive", "")
    if quantum is not None and (type(quantum) is not int or quantum < 1):
        raise HeadwayError(f"ordering {choice.name}: `quantum` must be a number of tokens, or None for none")
    if type(preemptive) is not bool:
        raise HeadwayError(f"ordering {choice.name}: `preemptive` must be True or False")
    return choice


def migration(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Migration]:
    verbs = {"moves": ("view",), "at_phase": ("request", "view")}
    choice, policy = _resolved("migration", spec, MIGRATIONS, load, verbs)
    if getattr(policy, "interval_s", "") is not None:
        _check_interval("migration", choice.name, policy, ", or None for never")
    return choice


def admission(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Admission]:
    verbs = {"holds": ("request",), "release": ("view",)}
    choice, policy = _resolved("admission", spec, ADMISSIONS, load, verbs)
    _check_interval("admission", choice.name, policy)
    return choice


def cascade(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Cascade]:
    verbs = {"enter": ("request", "view"), "accept": ("request", "score", "view")}
    return _resolved("cascade", spec, CASCADES, load, verbs)[0]


def scaler(spec: Spec, load: LoadModule | None = None) -> PolicyChoice[Scaler]:
    choice, policy = _resolved("scaler", spec, SCALERS, load, {"scale": ("view",)})
    _check_interval("scaler", choice.name, policy)
    return choice


def _resolved(
    kind: str, spec: Spec, registered: Mapping[str, type[P]], load: LoadModule | None, verbs: Verbs
) -> tuple[PolicyChoice[P], P]:
    """The choice, and one instance: creating it now reports bad arguments before the run."""
    arguments = {"name": spec} if isinstance(spec, str) else dict(spec) if isinstance(spec, Mapping) else {}
    name = arguments.pop("name", None)
    given = None
    if isinstance(name, type):
        given, name = name, name.__name__
    elif name is not None and not isinstance(name, str | int | float | list | dict):
        return _handed_in(kind, name, arguments, verbs)
    if not isinstance(name, str):
        raise HeadwayError(f"{kind}: expected a name, or `name` and arguments, got {spec!r}")
    if given is not None:
        made_by: type[P] = given
    elif name in registered:
        made_by = registered[name]
    elif ":" in name:
        made_by = _users_class(kind, name, load or _import_from_here)
    elif "." in name:
        module_name, _, class_name = name.rpartition(".")
        raise HeadwayError(
            f"unknown {kind} {name!r}; one of your own is module:Class, as in {module_name}:{class_name}"
        )
    else:
        raise unknown(kind, name, registered)
    where = f"{kind} {name}"
    choice = PolicyChoice(
        name.rpartition("/")[2],
        made_by,
        _arguments(where, made_by, arguments, load),
        () if made_by in registered.values() else tuple(verbs),
    )
    try:
        policy = made_by(**choice.arguments)
    except HeadwayError as error:
        raise HeadwayError(f"{where}: {error}") from error
    except Exception as error:
        raise HeadwayError(f"{where}: its constructor failed: {_one_line(error)}") from error
    for verb, parameters in verbs.items():
        _check_method(where, policy, verb, parameters)
    return choice, policy


def _handed_in(kind: str, instance: Any, arguments: Mapping[str, Any], verbs: Verbs) -> tuple[PolicyChoice[Any], Any]:
    """The choice for a provided instance."""
    name = type(instance).__name__
    if arguments:
        raise HeadwayError(f"{kind} {name}: an instance takes no arguments, got {next(iter(arguments))!r}")
    for verb, parameters in verbs.items():
        _check_method(f"{kind} {name}", instance, verb, parameters)
    own = {
        key: value
        for key in _parameters(f"{kind} {name}", type(instance))
        if isinstance(value := getattr(instance, key, None), str | int | float | bool)
    }
    return InstanceChoice(name, type(instance), own, tuple(verbs), instance), instance


def _users_class(kind: str, name: str, load: LoadModule) -> type[Any]:
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise HeadwayError(f"{kind} {name!r}: expected module:Class")
    if module_name.endswith(".py"):
        importable = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise HeadwayError(f"{kind} {name!r}: expected module:Class, as in {importable}:{class_name}")
    try:
        module = load(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise HeadwayError(f"{kind} {name}: {module_name} cannot be imported: {_one_line(error)}") from error
        raise HeadwayError(f"{kind} {name}: no module {error.name!r} here or among the installed packages") from None
    except Exception as error:
        raise HeadwayError(f"{kind} {name}: {module_name} cannot be imported: {_one_line(error)}") from error
    named = getattr(module, class_name, None)
    if not isinstance(named, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        raise unknown("class", class_name, classes, f"{kind} {module_name}")
    return named


def _import_from_here(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current directory, as for `python -m`
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _arguments(where: str, made_by: type[Any], given: Mapping[str, Any], load: LoadModule | None) -> dict[str, Any]:
    parameters = _parameters(where, made_by)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given:
            if not parameters:
                raise HeadwayError(f"{where}: takes no arguments, got {name!r}")
            if name not in parameters:
                raise unknown("argument", name, parameters, where)
    for parameter in parameters.values():
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in given:
            raise HeadwayError(f"{where}: needs the argument {parameter.name!r}")
    hints = _hints(made_by)
    return {
        name: router(value, load)
        if hints.get(name) == MakeRouter and not callable(value)
        else _converted(f"{where}: {name}", value, hints.get(name, Any))
        for name, value in given.items()
    }


def _parameters(where: str, made_by: type[Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a policy's constructor."""
    try:
        return _signature(made_by).parameters  # type: ignore[arg-type]  # a type is hashable
    except ValueError:  # some of Python's own classes have no signature
        raise HeadwayError(
            f"{where}: expected a policy's class; the arguments of {made_by.__name__} are unknown"
        ) from None


@lru_cache(maxsize=256)
def _signature(made_by: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(made_by)


def _hints(made_by: type[Any]) -> dict[str, Any]:
    """The annotated types of the constructor's arguments that can be resolved at run time."""
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
        raise HeadwayError(f"{where}: {mismatch(str(error))}: {value!r}") from None
    except TypeError:  # msgspec does not know the type: the class must check it
        return value


def _check_method(where: str, policy: object, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(policy, name, None)
    shown = f"`{name}({', '.join(arguments)})`"
    if not callable(method):
        raise HeadwayError(f"{where}: has no method {shown}")
    in_class = inspect.getattr_static(policy, name, None)
    is_plain = isinstance(in_class, FunctionType | MethodDescriptorType) and method is not in_class
    if not (_method_takes(in_class, arguments) if is_plain else _takes(method, arguments)):
        raise HeadwayError(f"{where}: expected a method {shown}")


@lru_cache(maxsize=256)
def _method_takes(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """`_takes` of a method in its class. A plan makes its policies thousands of times."""
    return _takes(function, ("self", *arguments))


def _takes(method: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Whether a call with so many arguments fits a method."""
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _check_interval(kind: str, name: str, policy: object, otherwise: str = "") -> None:
    interval_s: Any = getattr(policy, "interval_s", None)
    if type(interval_s) not in (int, float) or not 0 < interval_s < inf:
        raise HeadwayError(f"{kind} {name}: `interval_s` must be seconds, more than 0{otherwise}")
    if interval_s < LEAST_INTERVAL_S:
        raise HeadwayError(f"{kind} {name}: `interval_s` is {interval_s:g}; expected {LEAST_INTERVAL_S:g} s or more")


def _one_line(error: Exception) -> str:
    """An exception of the user's code with its file and line, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else ""
    if not at and frames:
        at = f"{frames[-1].filename}:{frames[-1].lineno}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{at}: {type(error).__name__}: {text}"


def _same(value: Any, default: Any) -> bool:
    """Whether an argument equals the default. True does not equal 1."""
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def _text(value: Any) -> str:
    """The text of a value. Struct fields with default values are left out, like arguments."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        defaults = {
            each.name: each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory()
            for each in fields
        }
        shown = [
            f"{name}={_text(getattr(value, name))}"
            for name, default in defaults.items()
            if not _same(getattr(value, name), default)
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)
