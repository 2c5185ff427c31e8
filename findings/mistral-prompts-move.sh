#!/usr/bin/env bash
# mistral-common 1.13.1 (with sentencepiece 0.2.3, tiktoken 0.14.0): the prompt of a conversation's next turn does not begin
# with the prompt of the turn before.
#
# Expected: a chat is rendered from its front to its end, with the system prompt and the tools first. So the prompt of turn 2
# is that of turn 1 and more tokens, and an engine with a prefix cache computes only the new ones.
#
# Seen: the tokenizers v2 and v3 (Mixtral 8x7B, Mistral 7B v0.3, Mistral Nemo) put the system prompt and the tools before the
# LAST user message, v7 the tools. Both move on with each turn. Of a prompt of 607 tokens turn 2 finds 2 in the cache
# (1 with tools); later turns find nothing from the last user message on. v1, and v7 without tools, extend the prompt.
# `vllm serve --tokenizer-mode mistral` renders chats with this package. Routers that compare the texts of messages, and
# traces whose turns are said to extend each other, count on reuse that the engine cannot have.
#
# tokenizer        case      turn 1  turn 2  same   turn 3  same
# tokenizer.model.v1 plain      613    1074   613     1535  1074
# 240216 v2        plain        608    1063     2     1518   457
# 240216 v2        tools        946    1401     1     1856   456
# 240323 v3        plain        608    1063     2     1518   457
# 240323 v3        tools        946    1401     1     1856   456
# tekken 240718 v3 plain        607    1062     2     1517   457
# tekken 240718 v3 tools        945    1400     1     1855   456
# 241114 v7        plain        608    1063   608     1518  1063
# 241114 v7        tools        946    1401   244     1856   699
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mistral-common==1.13.1 sentencepiece==0.2.3 tiktoken==0.14.0

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from pathlib import Path

import mistral_common
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

SEEN = {
    ("tokenizer.model.v1", "plain"): [613, 1074, 613, 1535, 1074],
    ("mistral_instruct_tokenizer_240216.model.v2", "plain"): [608, 1063, 2, 1518, 457],
    ("mistral_instruct_tokenizer_240216.model.v2", "tools"): [946, 1401, 1, 1856, 456],
    ("mistral_instruct_tokenizer_240323.model.v3", "plain"): [608, 1063, 2, 1518, 457],
    ("mistral_instruct_tokenizer_240323.model.v3", "tools"): [946, 1401, 1, 1856, 456],
    ("tekken_240718.json", "plain"): [607, 1062, 2, 1517, 457],
    ("tekken_240718.json", "tools"): [945, 1400, 1, 1855, 456],
    ("mistral_instruct_tokenizer_241114.model.v7", "plain"): [608, 1063, 608, 1518, 1063],
    ("mistral_instruct_tokenizer_241114.model.v7", "tools"): [946, 1401, 244, 1856, 699],
}
folder = Path(mistral_common.__file__).parent / "data"
tools = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "A tool of some use for the agent, with a text of some length.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for i in range(5)
]
question = "Some words of a user. " * 60
chat = [{"role": "system", "content": "You are a helpful agent. " * 40}, {"role": "user", "content": question + "1"}]
turns = [list(chat)]
for number, said in ((2, "Answer one. "), (3, "Answer two. ")):
    chat += [{"role": "assistant", "content": said * 30}, {"role": "user", "content": f"{question}{number}"}]
    turns.append(list(chat))


def common(before, after):
    return next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))


seen = {}
print("tokenizer                                   case   turn 1  turn 2  same   turn 3  same")
for name, case in SEEN:
    tokenizer = MistralTokenizer.from_file(folder / name)
    one, two, three = (
        tokenizer.encode_chat_completion(
            ChatCompletionRequest(messages=turn, tools=tools if case == "tools" else None, model="m")
        ).tokens
        for turn in turns
    )
    seen[name, case] = [len(one), len(two), common(one, two), len(three), common(two, three)]
    print(f"{name:43} {case:5} {len(one):7} {len(two):7} {common(one, two):5} {len(three):8} {common(two, three):5}")
raise SystemExit(0 if seen == SEEN else "CHANGED: these are not the counts that were seen with 1.13.1")
PYTHON
echo "as seen"
