"""Measurements of the runs by kind, strategy and seed."""

from __future__ import annotations

from collections.abc import Sequence

from headway_papers.reproduce.results import SeedResults, listed_means
from headway_papers.reproduce.sageserve.scenes import LLAMA_2
from headway_papers.reproduce.tasks import Measurement


class SageServeRuns(SeedResults):
    """Measurements with keys (kind, strategy, seed)."""

    def includes(self, kind: str, *names: str) -> bool:
        """Whether these strategies ran; without names, whether any ran."""
        return all((kind, name, self.seeds[0]) in self.results for name in names or self.names(kind)[:1] or ("",))

    def names(self, kind: str) -> list[str]:
        """Names of the strategies in this kind of run, in order."""
        return list(dict.fromkeys(name for key, name, _ in self.results if key == kind))

    def first(self, kind: str, name: str) -> Measurement:
        """The measurement of the first seed."""
        return self.results[kind, name, self.seeds[0]]

    def of_model(self, kind: str, name: str, key: str, model: str = LLAMA_2) -> list[float]:
        """A measurement of one model, by seed."""
        return [float(value) for value in self.values((kind, name), "models", model, key)]

    def of_all(self, kind: str, name: str, key: str) -> list[float]:
        """A measurement of all models together, by seed."""
        return [float(value) for value in self.values((kind, name), key)]

    def means(self, kind: str, names: Sequence[str], key: str, model: str | None = LLAMA_2) -> str:
        """Text such as "12.3 (reactive), 10.1 (lt-u)"; without a model, for all models together."""
        return listed_means(
            {
                name: self.of_all(kind, name, key) if model is None else self.of_model(kind, name, key, model)
                for name in names
            }
        )
