"""Throughput of a combo by the step-time model, for requests of mean length without queues.

`InstanceSpeed` has calibrated counterparts of the closed forms in `cost_efficiency`. `FluidEstimate` estimates goodput.
A simulation gives less, because lengths vary and queues form. A simulation may exceed it only where idle prefill
instances decode, which the estimate does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from headway.catalog.coefficients import Coefficients
from headway.core.fleet import Engine, Gpu, Model, Parallel
from headway.perf import memory
from headway.perf.speculation import step_model
from headway.perf.step import launched_s
from headway.planning.combos.problem import DEFAULT_NETWORK_BYTES_PER_S, GpuCombo, Group, ServiceSlo, WorkloadPattern


class InstanceSpeed:
    def __init__(self, model: Model, gpu: Gpu, engine: Engine, tp: int, own: Coefficients | None = None) -> None:
        parallel = Parallel(tp)
        self.engine, self.model = engine, model
        self.kv_tokens = memory.plan(model, gpu, engine, parallel).kv_capacity_tokens
        step = step_model(model, gpu, engine, parallel, own)
        self.line, self.calibrated = step.line, step.calibrated

    def batch(self, pattern: WorkloadPattern) -> int:
        """Sequences that decode at once when memory is full."""
        context = pattern.prompt_tokens + pattern.output_tokens / 2
        return max(1, min(self.engine.max_num_seqs, int(self.kv_tokens / context)))

    def prompts_s(self, pattern: WorkloadPattern, num: int) -> float:
        """Seconds to prefill `num` prompts together. Tokens beyond the token budget take further iterations."""
        left, before, total_s = round(pattern.prompt_tokens), 0, 0.0
        budget = max(1, self.engine.max_num_batched_tokens // num)
        while left > 0:
            chunk = min(left, budget)
            total_s += launched_s(self.line(0, 0, [(chunk, before)] * num))
            left, before = left - chunk, before + chunk
        return total_s

    def prompt_s(self, pattern: WorkloadPattern, ttft_s: float = inf) -> float:
        """Seconds per prompt in the largest batch that ends within `ttft_s`; infinite if none does."""
        most = max(1, self.engine.max_num_batched_tokens // round(pattern.prompt_tokens))
        if self.prompts_s(pattern, 1) > ttft_s:
            return inf
        num = _largest(min(most, self.engine.max_num_seqs), lambda num: self.prompts_s(pattern, num) <= ttft_s)
        return self.prompts_s(pattern, num) / num

    def step_s(self, pattern: WorkloadPattern, batch: int) -> float:
        """Seconds of a decode step of a batch halfway through its answers."""
        context = round(batch * (pattern.prompt_tokens + pattern.output_tokens / 2))
        window = self.model.sliding_window_tokens or 0
        return self.line(batch, context, (), min(context, batch * window))[0]

    def prefill_tokens_per_s(self, pattern: WorkloadPattern) -> float:
        """S_prefill (Eq. 5) of the step-time model."""
        return pattern.prompt_tokens / self.prompt_s(pattern)

    def decode_tokens_per_s(self, pattern: WorkloadPattern) -> float:
        """S_decode (Eq. 11) of the step-time model, with full memory."""
        batch = self.batch(pattern)
        return batch / self.step_s(pattern, batch)

    def prefill_rps(self, pattern: WorkloadPattern, slo: ServiceSlo) -> float:
        if self.kv_tokens < pattern.prompt_tokens:
            return 0.0
        return 1.0 / self.prompt_s(pattern, _limit(slo.ttft_s))

    def decode_rps(self, pattern: WorkloadPattern, slo: ServiceSlo) -> float:
        if pattern.output_tokens <= 1:
            return inf
        return self._answers_rps(pattern, slo, 0.0)

    def aggregated_rps(self, pattern: WorkloadPattern, slo: ServiceSlo) -> float:
        """Requests per second of an instance that prefills and decodes.

        In a steady state each answer waits for the prompts that arrive while it is written: a token takes
        `step(B) + B prompt_s / output_tokens` in the mean.
        """
        prompt_s = self.prompt_s(pattern, _limit(slo.ttft_s))
        if pattern.output_tokens <= 1 or prompt_s == inf:
            return 1.0 / prompt_s
        return self._answers_rps(pattern, slo, prompt_s)

    def _answers_rps(self, pattern: WorkloadPattern, slo: ServiceSlo, prompt_s: float) -> float:
        """Answers per second if each includes `prompt_s` of prefill on the same instance."""
        tokens = pattern.output_tokens - 1
        limit_s = _limit(slo.tpot_s)

        def token_s(batch: int) -> float:
            return self.step_s(pattern, batch) + batch * prompt_s / tokens

        holds_one = self.kv_tokens >= pattern.prompt_tokens + pattern.output_tokens
        if not holds_one or token_s(1) > limit_s:
            return 0.0
        batch = _largest(self.batch(pattern), lambda batch: token_s(batch) <= limit_s)
        return batch / (token_s(batch) * tokens)


class FluidEstimate:
    """A `Profiler` without simulation. Caches the speeds of instances."""

    def __init__(
        self,
        models: Mapping[str, Model],
        gpus: Mapping[str, Gpu],
        engine: Engine,
        network_bytes_per_s: float = DEFAULT_NETWORK_BYTES_PER_S,
        coefficients: Callable[[str], Coefficients] | None = None,
    ) -> None:
        """`coefficients`: step times on a GPU, by its name; None: the catalog's."""
        self.models, self.gpus, self.engine, self.coefficients = models, gpus, engine, coefficients
        self.network_bytes_per_s = network_bytes_per_s
        self._speeds: dict[tuple[str, str, int], InstanceSpeed] = {}

    def speed(self, model: str, group: Group) -> InstanceSpeed:
        key = (model, group.gpu, group.tp)
        if key not in self._speeds:
            own = self.coefficients(group.gpu) if self.coefficients is not None else None
            self._speeds[key] = InstanceSpeed(self.models[model], self.gpus[group.gpu], self.engine, group.tp, own)
        return self._speeds[key]

    def goodput_rps(self, combo: GpuCombo, workload: WorkloadPattern, slo: ServiceSlo) -> float:
        """Requests per second within the SLO; 0 if no rate is possible."""
        first, second = combo.phases
        if combo.aggregated is not None:
            return first.instances * self.speed(combo.model, first).aggregated_rps(workload, slo)
        prefill, decode = self.speed(combo.model, first), self.speed(combo.model, second)
        per_request = memory.kv_bytes_per_token(prefill.model, self.engine.kv_dtype_bytes) * workload.prompt_tokens
        network_rps = min(first.instances, second.instances) * self.network_bytes_per_s / per_request
        return min(
            first.instances * prefill.prefill_rps(workload, slo),
            second.instances * decode.decode_rps(workload, slo),
            network_rps,
        )


def _limit(seconds: float | None) -> float:
    return inf if seconds is None else seconds


def _largest(most: int, is_met: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that satisfies `is_met`, if 1 does and `is_met` is monotone."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle - 1)
    return low
