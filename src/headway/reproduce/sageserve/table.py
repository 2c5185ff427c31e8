"""Numbers of the runs by kind, strategy and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from headway.reproduce.sageserve.scenes import LLAMA_2
from headway.reproduce.tasks import Measurement


class SageServeRuns:
    """Numbers of runs, one a seed."""

    def __init__(self, found: Mapping[tuple[Any, ...], Measurement], seeds: Sequence[int]) -> None:
        self._found, self.seeds = found, seeds

    def has(self, kind: str, *names: str) -> bool:
        """Whether these strategies ran, and any did."""
        return all((kind, name, self.seeds[0]) in self._found for name in names or self.names(kind)[:1] or ("",))

    def names(self, kind: str) -> list[str]:
        return list(dict.fromkeys(name for key, name, _ in self._found if key == kind))

    def values(self, kind: str, name: str, of: Callable[[Measurement], Any]) -> list[Any]:
        """Something of each seed's run."""
        return [of(self._found[kind, name, seed]) for seed in self.seeds]

    def one(self, kind: str, name: str) -> Measurement:
        return self._found[kind, name, self.seeds[0]]

    def llama(self, kind: str, name: str, key: str, model: str = LLAMA_2) -> list[float]:
        """A number of a model's."""
        return self.values(kind, name, lambda run: float(run["models"][model][key]))

    def whole(self, kind: str, name: str, key: str) -> list[float]:
        """A number of all models'."""
        return self.values(kind, name, lambda run: float(run[key]))

    def means(self, kind: str, names: Sequence[str], key: str, model: str | None = LLAMA_2) -> str:
        """As in "12.3 (reactive), 10.1 (lt-u)"; without a model, of all of them."""
        of = {
            name: self.whole(kind, name, key) if model is None else self.llama(kind, name, key, model) for name in names
        }
        return ", ".join(f"{fmean(values):.3g} ({name})" for name, values in of.items())


def less(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """By which share the first is less, by seed; None where the second is 0."""
    return [1 - x / y if y else None for x, y in zip(a, b, strict=True)]


def more(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """By which share the first is more, by seed; None where the second is 0."""
    return [x / y - 1 if y else None for x, y in zip(a, b, strict=True)]
