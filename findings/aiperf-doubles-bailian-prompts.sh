#!/usr/bin/env bash
# AIPerf 0.13.0, `--custom-dataset-type bailian_trace --fixed-schedule`, with a conversation in the format of the public traces of
# Alibaba's Bailian (Qwen): each row is a request as the service got it, so that `input_length` counts the history, and the
# `hash_ids` of a turn begin with those of the turn before.
#
# Expected: each request is sent with `input_length` tokens, and a turn's prompt begins with that of the turn before, as `hash_ids`
# say: of each later turn here an engine with a prefix cache computes 80 tokens.
#
# Seen: AIPerf makes a message of `input_length` tokens for each row, history and all, and sends it behind the messages and answers
# of all turns before, whose texts it repeats. Prompts grow with the square of the turns: turn 5 has 3.5 times its tokens, and
# what an engine must compute of it is 480 tokens, not 80. Mean prompt, prefill and cache hits are those of
# another service; nothing warns. Rows without turns (`parent_chat_id` -1) are replayed as they are.
#
# turn   input_length   tokens sent   of them new to a prefix cache (in the trace)
# 1      160             160          160 (160)
# 2      240             420          240 (80)
# 3      320             760          320 (80)
# 4      400            1180          400 (80)
# 5      480            1680          480 (80)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q aiperf==0.13.0

HF_HOME=$folder/hf HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

folder = Path(sys.argv[1])
BLOCK, TURNS, FIRST, ANSWER, QUESTION = 16, 5, 160, 20, 60
LENGTHS = [FIRST + turn * (ANSWER + QUESTION) for turn in range(TURNS)]
TRACE = [
    {"chat_id": turn + 1, "parent_chat_id": turn or -1, "timestamp": float(turn), "input_length": tokens, "output_length": ANSWER,
     "type": "text", "turn": turn + 1, "hash_ids": list(range(tokens // BLOCK))}
    for turn, tokens in enumerate(LENGTHS)
]
ABOUT = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}


class Engine(BaseHTTPRequestHandler):
    """Streams the tokens that were asked for at once; keeps the chats."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.reply(b'{"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x"}]}', "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.chats.append([(each["role"], text(each["content"])) for each in body["messages"]])
        events = [{**ABOUT, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}] * ANSWER
        events.append({**ABOUT, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        lines = [f"data: {json.dumps(each)}\n\n" for each in events] + ["data: [DONE]\n\n"]
        self.reply("".join(lines).encode(), "text/event-stream")

    def reply(self, data, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def text(content):
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


# A tokenizer of bytes, as a repository in the hub's folder, from which AIPerf takes it.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={each: i for i, each in enumerate([*letters, "</s>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
repository = folder / "hf/hub/models--some--letters"
(repository / "refs").mkdir(parents=True)
(repository / "refs/main").write_text("0" * 40)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")
fast.save_pretrained(repository / "snapshots" / ("0" * 40))
(folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRACE))

engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
engine.daemon_threads, engine.chats = True, []
engine.handle_error = lambda *about: None  # AIPerf resets its connections
threading.Thread(target=engine.serve_forever, daemon=True).start()
command = [folder / "venv/bin/aiperf", "profile", "--model", "m", "--tokenizer", "some/letters", "--endpoint-type", "chat"]
command += ["--url", f"http://127.0.0.1:{engine.server_port}", "--streaming", "--input-file", folder / "trace.jsonl"]
command += ["--custom-dataset-type", "bailian_trace", "--fixed-schedule", "--ui-type", "none", "--no-gpu-telemetry"]
with open(folder / "log", "w") as log:
    done = subprocess.run([*command, "--artifact-dir", folder / "out"], stdout=log, stderr=log, cwd=folder, timeout=300)
if done.returncode:
    sys.exit(f"AIPerf failed:\n{(folder / 'log').read_text()[-3000:]}")


def tokens(chat):
    """Token ids of all contents: a block of the trace may have some more letters than tokens."""
    return [each for _, content in chat for each in fast(content)["input_ids"]]


before, sent = [], []
for row, chat in zip(TRACE, sorted(engine.chats, key=len), strict=True):
    ids = tokens(chat)
    same = next((i for i, (one, other) in enumerate(zip(before, ids)) if one != other), min(len(before), len(ids)))
    print(f"turn {row['turn']}: input_length {row['input_length']}, {len(chat)} messages, {len(ids)} tokens, {len(ids) - same} new")
    sent.append((len(ids), len(ids) - same))
    before = ids + [letters.index("a")] * ANSWER
sys.stdout.flush()
as_seen = all(1.5 * tokens < num for tokens, (num, _) in zip(LENGTHS[1:], sent[1:])) and sent[-1][0] > 3 * LENGTHS[-1]
as_seen &= abs(sent[0][0] - LENGTHS[0]) < LENGTHS[0] / 3 and sent[-1][1] > 4 * (ANSWER + QUESTION)
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with AIPerf 0.13.0")
PYTHON
echo "as seen"
