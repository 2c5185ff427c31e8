#!/usr/bin/env bash
# Dynamo 1.6.1's offline replay (ai-dynamo-runtime), a synthetic load of 40 sessions with four turns each, prompts of 1,024 tokens,
# beside a trace in Mooncake's format with 40 sessions of four turns that grow by 1,024 tokens.
#
# Expected: a session is a conversation: each turn's prompt begins with that of the turn before, so that prompts grow to four times
# their length, some 60% of their tokens are found in the prefix cache, and a router that follows the caches (`kv_router`) is
# better than one that does not. `request_count` is the number of requests.
#
# Seen: `turns_per_session` orders the requests, and no more: each turn is a fresh prompt of the same length, which shares nothing
# with the turn before. Nothing is found in a cache, and both routers do alike, so that a comparison
# of routers, or of cache sizes, "for multi-turn load" measures one that has no history. `request_count` is the number of
# sessions: four times as many requests. The replay has caches: the trace's turns are found in them.
#
# load                      router         requests    mean prompt    found in a cache    mean TTFT
# synthetic, four turns     round_robin    160         1024            0%                 32 ms
# synthetic, four turns     kv_router      160         1024            0%                 32 ms
# trace, four turns         round_robin    160         2560           10%                 54 ms
# trace, four turns         kv_router      160         2560           60%                 32 ms
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ai-dynamo-runtime==1.6.1

DYN_LOG=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import json
import sys
from pathlib import Path

from dynamo._core import run_mocker_synthetic_trace_replay, run_mocker_trace_replay

folder = Path(sys.argv[1])
SESSIONS, TURNS, TOKENS, BLOCK, ANSWER, WORKERS, TURN_S = 40, 4, 1024, 512, 64, 3, 20
rows = []
for turn in range(TURNS):
    for session in range(SESSIONS):
        num = (turn + 1) * TOKENS
        blocks = [1000 * session + i for i in range(num // BLOCK)]
        at_ms = 1000 * TURN_S * turn + 250 * session
        rows.append({"timestamp": at_ms, "input_length": num, "output_length": ANSWER, "hash_ids": blocks})
trace = folder / "trace.jsonl"
trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

seen = {}
for router in ("round_robin", "kv_router"):
    options = {"num_workers": WORKERS, "router_mode": router}
    seen["synthetic", router] = run_mocker_synthetic_trace_replay(
        TOKENS, ANSWER, SESSIONS, turns_per_session=TURNS, arrival_interval_ms=250.0, inter_turn_delay_ms=1000.0 * TURN_S, **options
    ).summary
    seen["trace", router] = run_mocker_trace_replay([trace], trace_block_size=BLOCK, **options).summary
for (load, router), each in seen.items():
    prompt, found = each["total_input_tokens"] / each["num_requests"], each["prefix_cache_reused_ratio"]
    print(f"{load:12}{router:14}{each['num_requests']} requests of {prompt:.0f} tokens; {found:.0%} found in a cache; "
          f"TTFT {each['mean_ttft_ms']:.0f} ms")
sys.stdout.flush()
synthetic, traced = ([seen[load, router] for router in ("round_robin", "kv_router")] for load in ("synthetic", "trace"))
as_seen = all(each["num_requests"] == SESSIONS * TURNS and each["total_input_tokens"] == SESSIONS * TURNS * TOKENS for each in synthetic)
as_seen &= not any(each["prefix_cache_reused_ratio"] for each in synthetic)
as_seen &= traced[1]["prefix_cache_reused_ratio"] > max(0.4, traced[0]["prefix_cache_reused_ratio"] + 0.2)
raise SystemExit(0 if as_seen else "CHANGED: not what was seen with 1.6.1")
PYTHON
echo "as seen"
