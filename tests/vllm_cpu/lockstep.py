"""vLLM's scheduler without a model, by vLLM's own Python: `python lockstep.py MODEL < runs.json > batches.json`.

Each run schedules requests in iterations of one second: those that have arrived are added, the scheduler decides, a
second later each request whose prompt is computed gets a token. Prints, for each run, the tokens that each iteration
computed, by request.
"""

import importlib
import json
import sys

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
ANSWER, END = 7, 9
"""Token ids: any token, and the one that ends the reasoning."""


def made(model, run):
    """A scheduler of the run's class, which is vLLM's own without an ordering."""
    config = EngineArgs(
        model=model,
        max_model_len=4096,
        max_num_seqs=run["seats"],
        max_num_batched_tokens=run["budget"],
        block_size=BLOCK,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = run["blocks"]
    if "ordering" in run:
        config.additional_config = {"headway_ordering": run["ordering"], "headway_reasoning_end": END}
        made_by = importlib.import_module("headway.vllm").Scheduler
    else:
        made_by = AsyncScheduler
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    cache = KVCacheConfig(num_blocks=run["blocks"], kv_cache_tensors=[], kv_cache_groups=groups)
    return made_by(config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def request_of(each):
    extra = {key: value for key, value in each.items() if key.startswith("headway_")}
    sampling = SamplingParams(max_tokens=each["output_tokens"], ignore_eos=True, extra_args=extra)
    sampling.update_from_generation_config({}, 2)
    prompt = [ANSWER] * each["prompt_tokens"]
    if not each.get("reasoning_tokens"):
        prompt[-1] = END  # as templates write it where the model shall not reason
    return Request(
        str(each["id"]),
        prompt,
        sampling,
        None,
        arrival_time=each["arrival_s"],
        priority=each.get("tier", 0),
    )


def tokens_of(scheduler, output, reasoning):
    """The tokens that a model would give: one for each request whose prompt is computed."""
    ids = list(output.num_scheduled_tokens)
    sampled = []
    for id in ids:
        request = scheduler.requests[id]
        is_end = request.num_output_tokens + 1 == reasoning[id]
        sampled.append([] if request.is_prefill_chunk else [END if is_end else ANSWER])
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index={id: i for i, id in enumerate(ids)}, sampled_token_ids=sampled
    )


def batches(scheduler, run):
    coming = sorted(run["requests"], key=lambda each: each["arrival_s"])
    reasoning = {str(each["id"]): each.get("reasoning_tokens", 0) for each in coming}
    now, seen = 0.0, []
    scheduler.clock = lambda: now
    while coming or scheduler.requests:
        if not scheduler.requests:
            now = max(now, coming[0]["arrival_s"])
        while coming and coming[0]["arrival_s"] <= now:
            scheduler.add_request(request_of(coming.pop(0)))
        output = scheduler.schedule()
        if output.num_scheduled_tokens:
            seen.append(sorted((int(id), tokens) for id, tokens in output.num_scheduled_tokens.items()))
            now += 1.0
        else:
            assert scheduler.finished_req_ids == set(), "the scheduler is stuck"
        scheduler.update_from_output(output, tokens_of(scheduler, output, reasoning))
    return seen


def main():
    runs = json.load(sys.stdin)
    print(json.dumps([batches(made(sys.argv[1], run), run) for run in runs]))  # noqa: T201  # a script's output


if __name__ == "__main__":
    main()
