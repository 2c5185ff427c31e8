"""The energy of iterations, from the power of replicas (`core.record.ReplicaPower`) and the work in stretches."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from headway.core.record import Columns, ReplicaPower
from headway.metrics.columns import Floats, Ints, floats

_NONE = ReplicaPower(
    0.0,
    0.0,
    0.0,
    memory_w=0.0,
    compute_w=0.0,
    weights_s=0.0,
    experts=(),
    micro_batches=1,
    context_s=0.0,
    window_s=0.0,
    window_tokens=0,
    token_s=0.0,
    sequence_s=0.0,
    tokens_per_sequence=1,
)


class FleetPower:
    """Power of the replicas of a run, by their position in `Records.replicas`. None: unknown."""

    def __init__(self, powers: Sequence[ReplicaPower | None]) -> None:
        self.idle_w = np.array([np.nan if each is None else each.idle_w for each in powers], dtype=np.float64)
        self._kinds = list(dict.fromkeys(each or _NONE for each in powers))
        code_of = {each: code for code, each in enumerate(self._kinds)}
        self._kind = np.array([code_of[each or _NONE] for each in powers], dtype=np.int64)

    def busy_joules(self, position: Ints, stretch: Columns, duration_s: Floats) -> Floats:
        """Joules above idle of each stretch, which lasted `duration_s`; 0 if the power is unknown."""
        if all(each is _NONE for each in self._kinds):
            return np.zeros(len(duration_s))
        kind = self._kind[position]
        decode, n = floats(stretch, "num_decode"), floats(stretch, "iterations")
        sequence_tokens = decode * self._of("tokens_per_sequence", kind)
        tokens = sequence_tokens + floats(stretch, "prefill_tokens")
        products_s = n * (tokens * self._of("token_s", kind) + sequence_tokens * self._of("sequence_s", kind))
        joules = self._of("active_w", kind) * duration_s
        joules += self._of("compute_w", kind) * np.sqrt(np.minimum(products_s, duration_s) * duration_s)
        if any(each.memory_w for each in self._kinds):
            read_s = self._read_s(kind, stretch, tokens, decode, n)
            joules += self._of("memory_w", kind) * np.minimum(read_s, duration_s)
        return np.minimum(joules, (self._of("limit_w", kind) - self._of("idle_w", kind)) * duration_s)

    def _read_s(self, kind: Ints, stretch: Columns, tokens: Floats, decode: Floats, n: Floats) -> Floats:
        """Seconds of each stretch to read weights and KV cache at peak bandwidth."""
        context = floats(stretch, "context_tokens") * n + decode * (stretch["advances"] != 0) * (n * (n - 1) / 2)
        in_window = np.minimum(context, n * decode * self._of("window_tokens", kind))
        read_s: Floats = n * self._of("weights_s", kind) + context * self._of("context_s", kind)
        read_s += in_window * self._of("window_s", kind)
        for code, each in enumerate(self._kinds):
            if each.experts and each.memory_w:
                rows = np.flatnonzero(kind == code)
                part, of = np.unique(tokens[rows] / each.micro_batches, return_inverse=True)
                expert_s = np.zeros(len(part))
                for seconds, chance in each.experts:
                    expert_s += seconds * (1.0 - (1.0 - chance) ** part)
                read_s[rows] += n[rows] * each.micro_batches * expert_s[of]
        return read_s

    def _of(self, name: str, kind: Ints) -> Floats:
        """A field of the replicas, for each stretch. An array of one value if all replicas have the same."""
        values = np.array(list(map(attrgetter(name), self._kinds)), dtype=np.float64)
        return values[kind] if len(values) > 1 else values
