"""Bodies and answers of vLLM's disaggregated prefill."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("httptools")

from headway.gateway.relay.request import CHAT, COMPLETIONS, EMBEDDINGS
from headway.gateway.relay.request_reader import read_request
from headway.gateway.scheduling import vllm_disaggregation
from headway.gateway.upstream.errors import EngineError


@pytest.mark.parametrize(
    ("path", "body", "can"),
    [
        (CHAT, {}, True),
        (CHAT, {"n": 1, "max_tokens": 2}, True),
        (CHAT, {"n": 2}, False),
        (CHAT, {"max_tokens": 1}, False),
        (COMPLETIONS, {"prompt": "hi"}, True),
        (COMPLETIONS, {"prompt": [1, 2]}, True),
        (COMPLETIONS, {"prompt": ["hi", "there"]}, False),
        (COMPLETIONS, {"prompt": "hi", "echo": True}, False),
        (COMPLETIONS, {"prompt": "hi", "best_of": 2}, False),
        (COMPLETIONS, {"prompt": "hi", "prompt_logprobs": 1}, False),
        (EMBEDDINGS, {"input": "hi"}, False),
    ],
)
def test_only_one_sequence_of_several_tokens_is_split(path: str, body: dict[str, Any], can: bool) -> None:
    messages = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
    asked = read_request(path, json.dumps({"model": "m", **messages, **body}).encode(), {})
    assert asked.can_be_split is can


def test_the_bodies_for_the_prefill_and_the_decode_replica() -> None:
    body = {
        "prompt": "hi",
        "max_completion_tokens": 50,
        "min_tokens": 5,
        "stream": True,
        "temperature": 0.5,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "kv_transfer_params": {"mine": 1},
    }
    assert vllm_disaggregation.prefill_body(body) == {
        "prompt": "hi",
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert vllm_disaggregation.decode_body(body, {"theirs": 2}) == {**body, "kv_transfer_params": {"theirs": 2}}
    assert "kv_transfer_params" not in vllm_disaggregation.decode_body(body, None)
    answer = vllm_disaggregation.read_prefill_answer(
        b'{"kv_transfer_params": {"a": [1]}, "usage": {"prompt_tokens": 7}, "choices": []}'
    )
    assert (answer.kv_transfer_params, answer.prompt_tokens) == ({"a": [1]}, 7)
    with pytest.raises(EngineError, match="no completion"):
        vllm_disaggregation.read_prefill_answer(b"[]")
