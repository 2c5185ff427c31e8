"""A vLLM server on a CPU whose requests an ordering of Headway's orders: `make vllm-cpu`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from vllm_cpu.servers import MARKS, SOURCE, Server, install, make_model

pytestmark = MARKS
ORDERING = """
class ShortestFirst:
    quantum = None
    preemptive = True

    def rank(self, request, now):
        if request.prompt_tokens == 13:
            raise ValueError("thirteen")
        return request.output_tokens - request.generated_tokens, request.arrival_s
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    install(folder)
    (folder / "my_orders.py").write_text(ORDERING)
    env = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "HEADWAY_ORDERING": "my_orders:ShortestFirst"}
    # What is computed again is in another batch: in bfloat16 that decides between tokens that are nearly as likely.
    options = "--dtype", "float32", "--max-num-seqs", "2", "--scheduler-cls", "headway.vllm.Scheduler"
    with ExitStack() as stack:
        server = Server(folder, make_model(folder), stack, *options, env=env)
        server.wait()
        yield server


def complete(server: Server, output_tokens: int, prompt_tokens: int = 8) -> list[int]:
    """The tokens of an answer; its prompt differs with its length."""
    hints, prompt = {"headway_output_tokens": output_tokens, "headway_tier": 2}, [5] * prompt_tokens
    prompt[0] = 5 + output_tokens % 200
    answer = server.complete(prompt, output_tokens, vllm_xargs=hints, return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == output_tokens
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_short_requests_go_first_and_a_failure_leaves_fcfs(server: Server) -> None:
    info = r'headway:ordering_info\{.*ordering="([^"]*)"\} 1.0'
    assert server.metric(info) == ["my_orders:ShortestFirst"]
    ended: dict[int, list[int]] = {}

    def send(output_tokens: int) -> None:
        ended[output_tokens] = complete(server, output_tokens)

    long = [threading.Thread(target=send, args=(tokens,)) for tokens in (1900, 1800)]
    short = [threading.Thread(target=send, args=(tokens,)) for tokens in (30, 20, 10)]
    for thread in long:
        thread.start()
    while server.metric(r"vllm:num_requests_running\S* (\S+)") != ["2.0"]:
        assert all(thread.is_alive() for thread in long), "the machine is too fast for this test"
    for thread in short:
        thread.start()
    for thread in (*long, *short):
        thread.join()
    order = list(ended)
    assert set(order[:3]) == {10, 20, 30} and order[3:] == [1800, 1900]
    assert float(server.metric(r"vllm:num_preemptions_total\S* (\S+)")[0]) >= 1
    assert server.metric(r'headway:requests\{.*tier="2"\} (\S+)') == ["0.0"]
    assert server.metric(r"headway:kv_blocks_total\S* (\S+)") == ["299.0"]
    assert all(complete(server, output_tokens) == tokens for output_tokens, tokens in ended.items())
    complete(server, 5, prompt_tokens=13)
    complete(server, 5)
    assert server.metric(info) == ["fcfs"] and server.metric(r"headway:ordering_failures\S* (\S+)") == ["1.0"]
