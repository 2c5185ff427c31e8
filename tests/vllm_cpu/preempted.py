"""Answers of engines with more or fewer KV blocks, by vLLM's own Python: `python preempted.py MODEL < runs.json`.

Each run gives an engine of its own all prompts at once, greedily; `runs.json` has the `requests` and the `runs`. Prints
for each run the tokens of the answers, the margin of each token over the next (natural logarithms), and how often
requests were preempted.
"""

import gc
import json
import sys

from vllm.distributed import cleanup_dist_env_and_memory

from vllm import LLM, SamplingParams

BLOCK = 32


def engine(model, run):
    """vLLM's own scheduler without an ordering."""
    ours = {}
    if "ordering" in run:
        config = {"headway_ordering": run["ordering"]}
        ours = {"scheduler_cls": "headway.vllm.Scheduler", "additional_config": config}
    return LLM(
        model,
        max_model_len=512,
        max_num_seqs=run["seats"],
        block_size=BLOCK,
        dtype=run["dtype"],
        enforce_eager=True,
        num_gpu_blocks_override=run["blocks"] + 1,
        disable_log_stats=False,
        seed=0,
        **ours,
    )


def preemptions(llm):
    return sum(each.value for each in llm.get_metrics() if each.name == "vllm:num_preemptions")


def answered(llm, requests):
    prompts = [{"prompt_token_ids": each["prompt"]} for each in requests]
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=each["output_tokens"],
            ignore_eos=True,
            logprobs=2,
            extra_args={key: value for key, value in each.items() if key.startswith("headway_")},
        )
        for each in requests
    ]
    before = preemptions(llm)
    outputs = [each.outputs[0] for each in llm.generate(prompts, sampling, use_tqdm=False)]
    margins = []
    for output in outputs:
        ranked = [sorted((each.logprob for each in step.values()), reverse=True) for step in output.logprobs]
        margins.append([first - second for first, second, *_ in ranked])
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "margins": margins,
        "preemptions": preemptions(llm) - before,
    }


def main():
    given, done = json.load(sys.stdin), []
    for run in given["runs"]:
        llm = engine(sys.argv[1], run)
        done.append(answered(llm, given["requests"]))
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    print(json.dumps(done))  # noqa: T201  # a script's output


if __name__ == "__main__":
    main()
