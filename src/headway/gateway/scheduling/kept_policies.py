"""The policy instances that are used in turn at the services. An instance keeps its learnt state while it is not
used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from headway.core.policy import Learner, SharingOrdering

Kind = Literal["router", "ordering", "migration", "admission"]


class _Kept(NamedTuple):
    model: str
    kind: Kind
    choice: object
    policy: Any


class KeptPolicies:
    """Policy instances by model, kind and choice. Choices are compared by value, because each read of a file creates
    new choice objects."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    def keep(self, model: str, kind: Kind, choice: object, policy: Any) -> None:
        """Store the instance of a choice at a model, unless one is stored."""
        if self._find(model, kind, choice) is None:
            self._kept.append(_Kept(model, kind, choice, policy))

    def of(self, model: str, kind: Kind, choice: Callable[[], Any]) -> Any:
        """The instance of a choice, created if there is none."""
        found = self._find(model, kind, choice)
        if found is None:
            self._kept.append(found := _Kept(model, kind, choice, choice()))
        return found.policy

    def _find(self, model: str, kind: Kind, choice: object) -> _Kept | None:
        return next(
            (each for each in self._kept if (each.model, each.kind) == (model, kind) and each.choice == choice), None
        )

    def learners(self, model: str) -> Iterator[Learner]:
        """Instances that learn from ended requests. Not orderings that share service: they learn when it is given."""
        policies = (each.policy for each in self._kept if each.model == model)
        return (each for each in policies if isinstance(each, Learner) and not isinstance(each, SharingOrdering))
