"""Logs every iteration of a vLLM engine with its work and duration, for `headway calibrate`.

`HEADWAY_STEP_LOG=FOLDER vllm serve ...` writes the log, with any scheduler. Each process of vLLM imports this module as
a plug-in (`vllm.general_plugins`), which has no effect without the variable. The module imports no other module of
Headway.

A file begins with `# ` and a JSON object about the engine. Its rows are iterations, in the order in which their outputs
were processed: `seq`, `scheduled_s` (end of `schedule()`), `done_s` (before its output is processed), `decodes` and
`decode_context_tokens` (of sequences that compute one token upon a computed prompt), `prompt_tokens` and
`prompt_chunks` (`new:computed before`, joined by `;`), `running`, `waiting`. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

VARIABLE = "HEADWAY_STEP_LOG"
COLUMNS = "seq,scheduled_s,done_s,decodes,decode_context_tokens,prompt_tokens,prompt_chunks,running,waiting"
FILE_BYTES = 32 * 2**20
"""Size at which a file is closed and the next file is begun."""
FILES = 8
"""Number of files kept for one engine; the oldest file is removed."""
FLUSH_S = 1.0
MOST_PENDING = 64
"""Maximum number of iterations whose output is awaited. An engine has one or two such iterations, or one for each
pipeline stage."""


def install() -> None:
    """Wrap vLLM's scheduler if the environment requests a log. vLLM calls this function in each of its processes."""
    folder = os.environ.get(VARIABLE, "").strip()
    if not folder:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    if not hasattr(Scheduler.schedule, "__wrapped__"):
        wrap(Scheduler, Path(folder))


def wrap(scheduler: Any, folder: Path) -> None:
    """Log the iterations of a scheduler class."""
    schedule, update = scheduler.schedule, scheduler.update_from_output

    @wraps(schedule)
    def logged_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        _log_of(self, folder).scheduled(self, output)
        return output

    @wraps(update)
    def logged_update(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        _log_of(self, folder).done(scheduler_output)
        return update(self, scheduler_output, *args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = logged_schedule, logged_update


def _log_of(scheduler: Any, folder: Path) -> StepLog:
    log = scheduler.__dict__.get("headway_step_log")
    if log is None:
        log = scheduler.headway_step_log = StepLog(folder, _about(scheduler.vllm_config))
    return log  # type: ignore[no-any-return]


class StepLog:
    """The rotated files of one engine. An error of the file system ends the log, never the engine."""

    def __init__(self, folder: Path, about: dict[str, Any], clock: Callable[[], float] = time.perf_counter) -> None:
        self._folder, self._about, self._clock = folder, about, clock
        self._name = f"steps-{about.get('rank', 0)}-{os.getpid()}"
        self._pending: dict[int, str] = {}
        self._seq = self._size = self._num_files = 0
        self._rows: list[str] = []
        self._flushed_s = clock()
        self._has_failed = False
        atexit.register(self.flush)

    def scheduled(self, scheduler: Any, output: Any) -> None:
        """Record an iteration that the scheduler has just composed."""
        if not output.total_num_scheduled_tokens or self._has_failed:
            return
        requests = scheduler.requests
        decodes = context = prompt_tokens = 0
        chunks = []
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = requests[request_id]
            before = request.num_computed_tokens - tokens  # `schedule` has already added the tokens
            if before >= request.num_prompt_tokens:
                decodes += 1
                context += before + 1
            else:
                prompt_tokens += tokens
                chunks.append(f"{tokens}:{before}")
        if len(self._pending) >= MOST_PENDING:
            self._pending.clear()  # remove iterations whose output never arrived
        self._pending[id(output)] = (
            f"{self._seq},{self._clock():.6f},%.6f,{decodes},{context},{prompt_tokens},{';'.join(chunks)},"
            f"{len(scheduler.running)},{len(scheduler.waiting)}\n"
        )
        self._seq += 1

    def done(self, output: Any) -> None:
        """Record that the output of an iteration has arrived."""
        row = self._pending.pop(id(output), None)
        if row is None:
            return
        now_s = self._clock()
        self._rows.append(row % now_s)
        if now_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = now_s
            self.flush()

    def flush(self) -> None:
        """Append the rows to the current file."""
        rows, self._rows = self._rows, []
        if not rows or self._has_failed:
            return
        text = "".join(rows)
        try:
            if not self._num_files or self._size >= FILE_BYTES:
                self._begin()
            with self._path(self._num_files).open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self._has_failed = True
            print(f"headway: no further steps are logged: {error}", flush=True)  # noqa: T201 in vLLM's own log
        self._size += len(text)

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._num_files, self._size = self._num_files + 1, 0
        self._path(self._num_files).write_text(f"# {json.dumps(self._about)}\n{COLUMNS}\n", encoding="utf-8")
        self._path(self._num_files - FILES).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number:04}.csv"


def _about(config: Any) -> dict[str, Any]:
    """The engine's properties that this version of vLLM exposes."""
    import vllm

    def read(path: str) -> Any:
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        return value if value is None or isinstance(value, str | int | float | bool) else str(value)

    about = {"log": 1, "engine": "vllm", "version": vllm.__version__, "device": _device()}
    return about | {key: value for key, path in _ABOUT.items() if (value := read(path)) is not None}


_ABOUT = {
    "model": "model_config.model",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "block_size": "cache_config.block_size",
    "num_gpu_blocks": "cache_config.num_gpu_blocks",
    "prefix_caching": "cache_config.enable_prefix_caching",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "async_scheduling": "scheduler_config.async_scheduling",
    "tp": "parallel_config.tensor_parallel_size",
    "pp": "parallel_config.pipeline_parallel_size",
    "dp": "parallel_config.data_parallel_size",
    "rank": "parallel_config.data_parallel_rank",
}


def _device() -> str:
    try:
        from vllm.platforms import current_platform

        return str(current_platform.get_device_name())
    except Exception:  # platforms differ in the properties that they report
        return ""
