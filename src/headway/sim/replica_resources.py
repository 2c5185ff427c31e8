"""Resources of one replica of a pool: step times, KV blocks, host memory, power, start-up time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from headway.catalog.costs import costs
from headway.core.fleet import LoraAdapter, Pool, Role
from headway.core.record import ReplicaPower
from headway.perf import copies, lora, memory
from headway.perf.copies import LOCAL, cold_start_s, kv_transfer_s
from headway.perf.engine_times import PoolTimes
from headway.perf.hosted import hosted_line
from headway.perf.power import replica_power
from headway.perf.speculation import step_model
from headway.perf.step import StepModel, most_graph_tokens
from headway.sim.adapter_slots import AdapterSlots, LoadTimes
from headway.sim.host_memory import HostMemory

Line = Callable[[int, int, Sequence[tuple[int, int]], int, int], tuple[float, float, int | None]]
"""The step times of a batch: see `perf.step.StepModel.line`."""


class Launches:
    """Seconds of the host to launch an iteration: without prompts, as one graph (`graph_s`); with prompts, of up to
    `most_graph_tokens`, for which graphs were captured in parts (`parts_s`); and of more tokens (`whole_s`)."""

    __slots__ = ("graph_s", "longest_s", "most_graph_tokens", "parts_s", "whole_s")

    def __init__(self, graph_s: float, parts_s: float, whole_s: float, most_graph_tokens: int) -> None:
        self.graph_s, self.parts_s, self.whole_s = graph_s, parts_s, whole_s
        self.longest_s = max(graph_s, parts_s, whole_s)
        self.most_graph_tokens = most_graph_tokens


class PoolResources:
    """What all replicas of a pool have in common, read once from its specification. A model that does not fit its GPUs
    is an error when sizes are read."""

    def __init__(self, pool: Pool, line: Line) -> None:
        engine = pool.engine
        self.pool, self.engine, self.line = pool, engine, line
        owner = getattr(line, "__self__", None)
        self.model = owner if isinstance(owner, StepModel) and owner.line == line else None
        """The model whose method `line` is, if it is one's. Compiled code calls it without making objects of the
        arguments."""
        self.times = PoolTimes(pool, line)
        self.reports_late = bool(engine.schedule_lag) and pool.parallel.tp * pool.parallel.pp == 1
        """Whether the process that reports an iteration's outputs launches the next one first. Engines on several GPUs
        have other processes for launches."""
        self.name, self.gpu, self.region = pool.name, pool.gpu.name, pool.region
        self.role: Role = pool.role
        self.model_name, self.model_names, self.loras = pool.model.name, pool.names, pool.lora_names
        self.max_concurrent: int | None = None if pool.hosted is None else pool.hosted.max_concurrent
        self.max_num_seqs = engine.max_num_seqs
        self.max_num_batched_tokens = engine.max_num_batched_tokens * pool.parallel.pp
        """Limit for all micro-batches together."""
        self.max_num_waiting, self.max_context_tokens = engine.max_num_waiting, pool.model.max_context_tokens
        self.window, self.drafts = pool.model.sliding_window_tokens, engine.drafts
        self.block_size_tokens, self.watermark = engine.block_size_tokens, engine.watermark
        self.caches_prefixes = engine.prefix_caching
        self.keep_s, self.keep_share = engine.kv_keep
        self.schedule_lag, self.launch_overhead_s = engine.schedule_lag, engine.launch_overhead_s
        self.request_s, self.tokenize_s = engine.request_overhead_s, engine.tokenize_s_per_token
        """Frontend time per request, and per prompt token."""
        self.response_s, self.token_s = engine.response_overhead_s, engine.token_overhead_s
        self.makes_first_token = pool.handover.first_token != "decode"
        self.sends_first_token = pool.handover.first_token == "sent"
        self.kv_transfer_s: Callable[[int], float] = partial(kv_transfer_s, pool)
        self._has_adapters = pool.lora is not None
        self._kv_blocks = -1
        self._launches: Launches | None = None
        self._host: HostMemory | None = None

    @property
    def kv_blocks(self) -> int:
        """KV blocks of one replica."""
        if self._kv_blocks < 0:
            self._kv_blocks = kv_blocks(self.pool)
        return self._kv_blocks

    @property
    def launches(self) -> Launches:
        """Seconds of the host to launch iterations of the pool's replicas, computed at the first use."""
        if self._launches is None:
            most = most_graph_tokens(self.engine, self.pool.parallel)
            parts_s, whole_s = (self.line(0, 0, [(tokens, 0)], 0, 0)[1] for tokens in (1, most + 1))
            self._launches = Launches(self.launch_overhead_s, parts_s, whole_s, most)
        return self._launches

    def new_host_memory(self) -> HostMemory:
        """Empty host memory for a new replica."""
        if self._host is None:
            self._host = host_memory(self.pool)
        return self._host.empty()

    def new_adapter_slots(self) -> AdapterSlots | None:
        """Empty LoRA slots for a new replica; None if the pool has no adapters."""
        return adapter_slots(self.pool) if self._has_adapters else None

    def power(self) -> ReplicaPower | None:
        """A replica's power by its load."""
        return replica_power(self.pool)


def calibrated_line(pool: Pool) -> Line:
    """Step times with the catalog's coefficients."""
    if pool.hosted is not None:
        return hosted_line(pool.hosted)
    return step_model(pool.model, pool.gpu, pool.engine, pool.parallel).line


def start_up_s(pool: Pool) -> float:
    """Seconds from requesting a replica until it serves: the pool's `start_s`, else with local weights."""
    if pool.start_s is not None:
        return pool.start_s
    plan = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel)
    num_gpus = pool.parallel.num_gpus
    return cold_start_s(plan.weights_bytes * num_gpus, num_gpus, LOCAL, costs().cold_start)


def kv_blocks(pool: Pool) -> int:
    """KV blocks of one replica: the memory's limit, or the pool's cap if lower; for a hosted replica, always enough."""
    if pool.hosted is not None:
        return pool.model.max_context_tokens * pool.engine.max_num_seqs // pool.engine.block_size_tokens
    plan = memory.plan(
        pool.model, pool.gpu, pool.engine, pool.parallel, pool.mean_sequence_tokens, lora.slots_bytes(pool)
    )
    tokens = plan.kv_capacity_tokens
    if pool.kv_capacity_tokens is not None:
        tokens = min(tokens, pool.kv_capacity_tokens)
    return tokens // pool.engine.block_size_tokens


def adapter_slots(pool: Pool) -> AdapterSlots | None:
    """Slots for the pool's LoRA adapters; None if it has none."""
    config = pool.lora
    if config is None:
        return None
    times = {each.name: adapter_times(pool, each) for each in config.adapters}
    return AdapterSlots(config.max_loras, config.max_cpu_loras or config.max_loras, times)


def adapter_times(pool: Pool, adapter: LoraAdapter) -> LoadTimes:
    """Times to load an adapter at a replica: from the node's disk cache, and from host memory."""
    num_bytes = lora.adapter_bytes(pool.model, adapter)
    copy_s = copies.host_copy_s(num_bytes, pool.gpu, pool.parallel.num_gpus)
    load_s = adapter.load_s
    if load_s is None:
        load_s = copies.load_s(num_bytes, 1, LOCAL, costs().cold_start) + copy_s
    return LoadTimes(load_s, copy_s)


def host_memory(pool: Pool) -> HostMemory:
    """Host memory of one replica for preempted and cached KV; none for a hosted pool."""
    if pool.hosted is not None:
        return HostMemory(0, lambda tokens: 0.0)
    per_token = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel).kv_bytes_per_token
    return HostMemory(
        int(pool.engine.host_memory_bytes / per_token),
        lambda tokens: copies.host_copy_s(tokens * per_token, pool.gpu, pool.parallel.num_gpus),
        int(pool.engine.kv_offload_bytes / per_token),
    )
