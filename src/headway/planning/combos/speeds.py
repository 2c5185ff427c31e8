"""What a combo can do by the step-time model, with every request of mean length and nobody waiting in line.

Calibrated counterparts of the closed forms in `cost_efficiency`, and an `Estimate` of goodput: a fluid limit. A
simulation stays below it, because lengths vary and queues form; it may pass it only where prefill instances decode in
idle time, which is not counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from msgspec import Struct

from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf import memory
from headway.perf.step import StepModel
from headway.planning.combos.combos import GpuCombo, Group

DEFAULT_NETWORK_BYTES_PER_S = 12.5e9
"""Of one instance, each way, as a pool's default."""


class Pattern(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of workload: a name by which a profiler finds its requests, and mean lengths (R_in, R_out)."""

    name: str | None
    """None: every request is of these lengths."""
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, field) < inf:
                raise ValueError(f"{field}: {getattr(self, field)}; expected 1 or more")


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """What a service is to keep; None: no such limit."""

    ttft_s: float | None = None
    """Time to the first token."""
    tpot_s: float | None = None
    """Mean time per output token after it."""

    def __post_init__(self) -> None:
        for field in ("ttft_s", "tpot_s"):
            if (value := getattr(self, field)) is not None and not 0 < value < inf:
                raise ValueError(f"{field}: {value}; expected more than 0")


class Speeds:
    """One instance: seconds of prefill and of decode steps."""

    def __init__(self, model: Model, gpu: Gpu, engine: Engine, tp: int, own: Coefficients | None = None) -> None:
        parallel = Parallel(tp)
        self.engine, self.model = engine, model
        self.room_tokens = memory.plan(model, gpu, engine, parallel).kv_capacity_tokens
        step = StepModel(model, gpu, engine, parallel, own)
        self.line, self.calibrated = step.line, step.calibrated

    def batch(self, pattern: Pattern) -> int:
        """Sequences that decode at once when memory is full."""
        context = pattern.prompt_tokens + pattern.output_tokens / 2
        return max(1, min(self.engine.max_num_seqs, int(self.room_tokens / context)))

    def prompts_s(self, pattern: Pattern, num: int) -> float:
        """Of so many prompts in one go; what is beyond the token budget takes further iterations."""
        left, before, total_s = round(pattern.prompt_tokens), 0, 0.0
        budget = max(1, self.engine.max_num_batched_tokens // num)
        while left > 0:
            chunk = min(left, budget)
            total_s += self.line(0, 0, [(chunk, before)] * num)[0]
            left, before = left - chunk, before + chunk
        return total_s

    def prompt_s(self, pattern: Pattern, ttft_s: float = inf) -> float:
        """Of one prompt in the largest batch that is done in time; infinite where one alone is not."""
        most = max(1, self.engine.max_num_batched_tokens // round(pattern.prompt_tokens))
        if self.prompts_s(pattern, 1) > ttft_s:
            return inf
        num = _largest(min(most, self.engine.max_num_seqs), lambda num: self.prompts_s(pattern, num) <= ttft_s)
        return self.prompts_s(pattern, num) / num

    def step_s(self, pattern: Pattern, batch: int) -> float:
        """A decode step of a batch halfway through its answers."""
        context = round(batch * (pattern.prompt_tokens + pattern.output_tokens / 2))
        window = self.model.sliding_window_tokens or 0
        return self.line(batch, context, (), min(context, batch * window))[0]

    def prefill_tokens_per_s(self, pattern: Pattern) -> float:
        """S_prefill (Eq. 5) of the step-time model."""
        return pattern.prompt_tokens / self.prompt_s(pattern)

    def decode_tokens_per_s(self, pattern: Pattern) -> float:
        """S_decode (Eq. 11) of the step-time model, memory full."""
        batch = self.batch(pattern)
        return batch / self.step_s(pattern, batch)

    def prefill_rps(self, pattern: Pattern, slo: Slo) -> float:
        """Prompts per second in time for the first token."""
        if self.room_tokens < pattern.prompt_tokens:
            return 0.0
        return 1.0 / self.prompt_s(pattern, _limit(slo.ttft_s))

    def decode_rps(self, pattern: Pattern, slo: Slo) -> float:
        """Answers per second within the time per token."""
        if pattern.output_tokens <= 1:
            return inf
        limit_s = _limit(slo.tpot_s)
        if not self._holds(pattern) or self.step_s(pattern, 1) > limit_s:
            return 0.0
        batch = _largest(self.batch(pattern), lambda batch: self.step_s(pattern, batch) <= limit_s)
        return batch / (self.step_s(pattern, batch) * (pattern.output_tokens - 1))

    def aggregated_rps(self, pattern: Pattern, slo: Slo) -> float:
        """Requests per second of an instance that does both.

        In a steady state each answer waits through the prompts that come while it is written: a token takes
        `step(B) + B prompt_s / output_tokens` in the mean.
        """
        prompt_s = self.prompt_s(pattern, _limit(slo.ttft_s))
        if pattern.output_tokens <= 1 or prompt_s == inf:
            return 1.0 / prompt_s
        tokens = pattern.output_tokens - 1
        limit_s = _limit(slo.tpot_s)

        def token_s(batch: int) -> float:
            return self.step_s(pattern, batch) + batch * prompt_s / tokens

        if not self._holds(pattern) or token_s(1) > limit_s:
            return 0.0
        batch = _largest(self.batch(pattern), lambda batch: token_s(batch) <= limit_s)
        return batch / (token_s(batch) * tokens)

    def _holds(self, pattern: Pattern) -> bool:
        """Whether memory has room for one request to its end."""
        return self.room_tokens >= pattern.prompt_tokens + pattern.output_tokens


class Estimate:
    """A `Profiler` without a simulation. Remembers instances that it has met."""

    def __init__(
        self,
        models: Mapping[str, Model],
        gpus: Mapping[str, Gpu],
        engine: Engine,
        network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S,
    ) -> None:
        self.models, self.gpus, self.engine = models, gpus, engine
        self.network_bytes_per_s = network_bytes_per_s
        self._speeds: dict[tuple[str, str, int], Speeds] = {}

    def speeds(self, model: str, group: Group) -> Speeds:
        """Of one instance of a group."""
        key = (model, group.gpu, group.tp)
        if key not in self._speeds:
            self._speeds[key] = Speeds(self.models[model], self.gpus[group.gpu], self.engine, group.tp)
        return self._speeds[key]

    def goodput_rps(self, combo: GpuCombo, workload: Pattern, slo: Slo) -> float:
        """Requests per second in time; 0: none, at any rate."""
        first, second = combo.phases
        if combo.aggregated is not None:
            return first.instances * self.speeds(combo.model, first).aggregated_rps(workload, slo)
        prefill, decode = self.speeds(combo.model, first), self.speeds(combo.model, second)
        per_request = memory.kv_bytes_per_token(prefill.model, self.engine.kv_dtype_bytes) * workload.prompt_tokens
        network_rps = min(first.instances, second.instances) * self.network_bytes_per_s / per_request
        return min(
            first.instances * prefill.prefill_rps(workload, slo),
            second.instances * decode.decode_rps(workload, slo),
            network_rps,
        )


def _limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def _largest(most: int, will_do: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that will do, where 1 does and what is smaller does too."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if will_do(middle) else (low, middle - 1)
    return low
