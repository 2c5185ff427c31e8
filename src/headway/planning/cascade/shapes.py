"""Every set of replicas that so many GPUs can make (3.2, parallelism strategy search)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from headway.core.errors import HeadwayError
from headway.core.fleet import Engine, Gpu, Model, Parallel, Role
from headway.perf import memory
from headway.planning.cascade.gpu_budget import Ints, Room
from headway.planning.cascade.problem import Replicas, ReplicaSet


@dataclass(frozen=True, eq=False)
class Sets:
    """Sets of replicas of one model: row i has `counts[i, j]` replicas of `shapes[j]`, `gpus[i]` GPUs in all."""

    shapes: tuple[Parallel, ...]
    counts: Ints
    kinds: tuple[int, ...] = ()
    """The type of GPU of each shape; empty: there is one type only."""
    names: tuple[str, ...] = ()
    """Of the types."""
    room: Room | None = None
    """How GPUs of several types are numbered; None: there is one type only."""
    roles: tuple[Role, ...] = ()
    """Of the replicas of each shape; empty: all are mixed."""

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def gpus(self) -> Ints:
        """GPUs of each set."""
        sizes = np.array([shape.num_gpus for shape in self.shapes], "i8")
        found: Ints = self.counts @ sizes
        return found

    @cached_property
    def vectors(self) -> Ints:
        """[set, type]: GPUs of each type."""
        sizes = np.zeros((len(self.shapes), max(len(self.names), 1)), "i8")
        for j, shape in enumerate(self.shapes):
            sizes[j, self.kinds[j] if self.kinds else 0] = shape.num_gpus
        found: Ints = self.counts @ sizes
        return found

    @cached_property
    def cells(self) -> Ints:
        """What each set takes, as tables number it: with one type of GPU, how many."""
        return self.gpus if self.room is None else self.room.cells(self.vectors)

    def on(self, j: int) -> str:
        """The type of GPU of a shape; empty where there is one only."""
        return self.names[self.kinds[j]] if self.kinds else ""

    def role(self, j: int) -> Role:
        """What the replicas of a shape are for."""
        return self.roles[j] if self.roles else "mixed"

    @cached_property
    def are_split(self) -> npt.NDArray[np.bool_]:
        """Whether each set has a combo."""
        split = [j for j in range(len(self.shapes)) if self.role(j) != "mixed"]
        return np.asarray((self.counts[:, split] > 0).any(axis=1))

    def some(self, rows: npt.NDArray[np.bool_] | np.bool_) -> Sets:
        """These sets only."""
        return replace(self, counts=self.counts[np.asarray(rows)])

    def __getitem__(self, i: int) -> ReplicaSet:
        pairs = zip(self.shapes, self.counts[i].tolist(), strict=True)
        return ReplicaSet(
            tuple(Replicas(s.tp, s.pp, n, self.on(j), self.role(j)) for j, (s, n) in enumerate(pairs) if n)
        )


def shapes(
    model: Model, gpu: Gpu, engine: Engine, num_gpus: int, server: int, max_pp: int
) -> tuple[tuple[Parallel, ...], str]:
    """Shapes that hold the model, smallest first; and, where there are none, why.

    A tensor-parallel group lies within a server: its size is a power of two that divides the server's, so that
    groups of whatever sizes fill servers without gaps. Stages of a pipeline may lie in different servers.
    """
    found, reason = [], f"{model.name}: no shape of at most {num_gpus} GPUs"
    for tp in (2**i for i in range(server.bit_length())):
        if server % tp:
            break
        for pp in range(1, max_pp + 1):
            try:
                memory.plan(model, gpu, engine, Parallel(tp, pp))
            except HeadwayError as error:
                reason = str(error)
            else:
                if tp * pp <= num_gpus:
                    found.append(Parallel(tp, pp))
    found.sort(key=lambda shape: (shape.num_gpus, shape.pp))
    return tuple(found), "" if found else reason


def replica_sets(of: Sequence[Parallel], num_gpus: int, max_kinds: int | None) -> Sets:
    """Every set of 1 to `num_gpus` GPUs with at most `max_kinds` different shapes."""
    rows = [row for row in _rows(tuple(of), num_gpus, len(of) if max_kinds is None else max_kinds) if any(row)]
    return Sets(tuple(of), np.array(rows, "i8").reshape(len(rows), len(of)))


def _rows(of: tuple[Parallel, ...], left: int, kinds: int) -> Iterator[tuple[int, ...]]:
    if not of or not kinds:
        yield (0,) * len(of)
        return
    first, rest = of[0], of[1:]
    for count in range(left // first.num_gpus + 1):
        for row in _rows(rest, left - count * first.num_gpus, kinds - (count > 0)):
            yield (count, *row)


def uniform_sets(of: Sequence[Parallel], num_gpus: int, server: int) -> Sets:
    """One set for each number of GPUs: tensor parallelism within a server, replicas across servers (4.3).

    Each server's GPUs, and those of the last one that is not full, are one replica of the largest shape that fits,
    then another of what is left. A model that fits in no part of a server is spread over servers as a pipeline.
    """
    flat = [shape for shape in of if shape.pp == 1] or list(of)
    rows: dict[tuple[int, ...], None] = {}
    for total in range(1, num_gpus + 1):
        servers = [server] * (total // server) + [total % server] if flat[0].pp == 1 else [total]
        row = [0] * len(of)
        for left in servers:
            for i, shape in sorted(enumerate(of), key=lambda pair: -pair[1].num_gpus):
                if shape in flat:
                    row[i] += left // shape.num_gpus
                    left %= shape.num_gpus
        if any(row):
            rows[tuple(row)] = None
    return Sets(tuple(of), np.array(list(rows), "i8").reshape(len(rows), len(of)))


def among(sets: Sets, of: Sequence[Parallel]) -> Sets:
    """Those sets whose replicas all have one of these shapes."""
    others = [i for i, each in enumerate(sets.shapes) if each not in of]
    return sets.some(~sets.counts[:, others].any(axis=1))


def unlike(by_type: Sequence[Sets], names: tuple[str, ...], room: Room, max_types: int | None) -> Sets:
    """Sets of replicas on several types of GPU: of each type one of its own sets or none, of so many types at most."""
    columns = [len(sets.shapes) for sets in by_type]
    starts = np.concatenate([[0], np.cumsum(columns)]).tolist()
    most = len(by_type) if max_types is None else max_types
    rows = [np.zeros((0, starts[-1]), "i8")]
    for num in range(1, most + 1):
        for some in combinations(range(len(by_type)), num):
            picks = np.indices([len(by_type[t]) for t in some]).reshape(num, -1)
            made = np.zeros((picks.shape[1], starts[-1]), "i8")
            for t, pick in zip(some, picks, strict=True):
                made[:, starts[t] : starts[t + 1]] = by_type[t].counts[pick]
            rows.append(made)
    shapes = tuple(shape for sets in by_type for shape in sets.shapes)
    kinds = tuple(t for t, num in enumerate(columns) for _ in range(num))
    return Sets(shapes, np.concatenate(rows), kinds, names, room)
