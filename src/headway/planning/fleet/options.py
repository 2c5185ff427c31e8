"""The options of a fleet plan, sized as far as the plans that are compared use them.

A plan over lower bounds costs no more than one over exact numbers. If it uses only exact options, it is therefore the
cheapest over exact numbers, too. Otherwise the options that it uses are made exact, and it is planned again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from headway.planning.fleet.problem import SizedOption
from headway.planning.fleet.sizing import ModelSizes, SizingTask, size
from headway.planning.rehearsals import Rehearsals

Chosen = Callable[[SizedOption], bool]


def every(_: SizedOption) -> bool:
    return True


class Options:
    """Every model on every type of GPU, and on pairs of types for prefill and decode."""

    def __init__(self, rehearsals: Rehearsals) -> None:
        self._rehearsals = rehearsals
        self._tasks: dict[str, SizingTask] = {}
        self.num_simulated = self.num_found = 0

    def begin(self, tasks: Sequence[SizingTask]) -> None:
        """Size the cheapest kind of GPUs for each model."""
        self._size(tasks)

    def _size(self, tasks: Sequence[SizingTask]) -> None:
        found: list[ModelSizes] = self._rehearsals.map(size, tasks)
        for task, each in zip(tasks, found, strict=True):
            self._tasks[task.model] = replace(task, kinds=each.kinds)
            self.num_simulated += each.num_simulated
            self.num_found += each.num_found

    def known(self) -> tuple[SizedOption, ...]:
        """One option for each kind of GPUs."""
        return tuple(kind.option() for task in self._tasks.values() for kind in task.kinds)

    def bounds(self, chosen: Chosen = every) -> list[SizedOption]:
        """What a plan may use."""
        found = (each for task in self._tasks.values() for kind in task.kinds for each in kind.bounds())
        return [each for each in found if chosen(each)]

    def settle(self, wanted: Iterable[SizedOption]) -> None:
        """Make the kinds of these options exact."""
        by_model: dict[str, set[int]] = {}
        for each in wanted:
            for i, kind in enumerate(self._tasks[each.model].kinds):
                if any(of_kind.unit == each.unit for of_kind in kind.units):
                    by_model.setdefault(each.model, set()).add(i)
        self._size([replace(self._tasks[model], wanted=tuple(sorted(which))) for model, which in by_model.items()])
