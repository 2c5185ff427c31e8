"""Resources of one replica of a pool: step times, KV blocks, host memory, power, start-up time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from headway.catalog.costs import costs
from headway.core.fleet import LoraAdapter, Pool
from headway.core.record import ReplicaPower
from headway.perf import copies, lora, memory
from headway.perf.copies import LOCAL, cold_start_s
from headway.perf.engine_times import PoolTimes
from headway.perf.hosted import hosted_line
from headway.perf.power import replica_power
from headway.perf.speculation import step_model
from headway.perf.step import StepModel, most_graph_tokens
from headway.sim.adapter_slots import AdapterSlots, LoadTimes
from headway.sim.host_memory import HostMemory
from headway.sim.timeline import Launches, Line


class PoolResources:
    """What all replicas of a pool have in common. A model that does not fit its GPUs is an error when sizes are
    read."""

    def __init__(self, pool: Pool, line: Line) -> None:
        self.pool, self.line = pool, line
        owner = getattr(line, "__self__", None)
        self.model = owner if isinstance(owner, StepModel) and owner.line == line else None
        """The model whose method `line` is, if it is one's."""
        self.times = PoolTimes(pool, line)
        self.reports_late = bool(pool.engine.schedule_lag) and pool.parallel.tp * pool.parallel.pp == 1
        """Whether the process that reports an iteration's outputs launches the next one first. Engines on several GPUs
        have other processes for launches."""

    @cached_property
    def kv_blocks(self) -> int:
        """KV blocks of one replica."""
        return kv_blocks(self.pool)

    @cached_property
    def launches(self) -> Launches:
        """Launch times of iterations."""
        engine = self.pool.engine
        most = most_graph_tokens(engine, self.pool.parallel)
        parts_s, whole_s = (self.line(0, 0, [(tokens, 0)], 0, 0)[1] for tokens in (1, most + 1))
        return Launches(engine.launch_overhead_s, parts_s, whole_s, most)

    @cached_property
    def new_host_memory(self) -> Callable[[], HostMemory]:
        """A factory of empty host memories, one per replica."""
        return host_memories(self.pool)

    def new_adapter_slots(self) -> AdapterSlots | None:
        """Empty LoRA slots for a new replica; None if the pool has no adapters."""
        return adapter_slots(self.pool)

    @cached_property
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
    return host_memories(pool)()


def host_memories(pool: Pool) -> Callable[[], HostMemory]:
    """A factory of empty host memories, one per replica; the size is computed once."""
    if pool.hosted is not None:
        return partial(HostMemory, 0, lambda tokens: 0.0)
    per_token = memory.plan(pool.model, pool.gpu, pool.engine, pool.parallel).kv_bytes_per_token
    return partial(
        HostMemory,
        int(pool.engine.host_memory_bytes / per_token),
        lambda tokens: copies.host_copy_s(tokens * per_token, pool.gpu, pool.parallel.num_gpus),
        int(pool.engine.kv_offload_bytes / per_token),
    )
