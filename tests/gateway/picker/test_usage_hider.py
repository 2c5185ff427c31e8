"""Whatever an engine streams, and wherever it is cut, all of it is passed on but reports of tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.gateway.picker.usage_hider import UsageHider

PASSED = [
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":null}',
    b": ping",
    b"event: done\ndata: {}",
    b'data: {"choices":[{"delta":{"content":"\\"choices\\": [] \\"usage\\""}}]}',
    b'data: {"choices":[],"usage":null}',
    b'data: {"error":{"message":"out of memory","code":500},"choices":[],"usage":{"prompt_tokens":1}}',
    b'data: {"choices": [], "usage": {"prompt',
    b"data: [DONE]",
    b"data: \xff\xfe",
    b"what is no event",
]
HIDDEN = [
    b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2}}',
    b'data:{"id":"a", "choices" : [ ], "usage": {"total_tokens": 4}}',
]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([*PASSED, *HIDDEN]), max_size=6),
    st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]),
    st.sampled_from([b"", b"data: [DONE]", HIDDEN[0][:40], b"data: {"]),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_a_stream_passes_whole_but_for_reports_of_tokens(
    events: list[bytes], blank: bytes, tail: bytes, cuts: list[int]
) -> None:
    sent = b"".join(event + blank for event in events) + tail
    hider, passed = UsageHider(), b""
    places = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
    for start, end in pairwise(places):
        passed += hider.feed(sent[start:end])
    passed += hider.rest()
    assert passed == b"".join(event + blank for event in events if event not in HIDDEN) + tail
    assert hider.rest() == b""


def test_no_more_than_a_mebibyte_is_held() -> None:
    hider, part, num = UsageHider(), b"x" * 65_536, 0
    for _ in range(40):
        num += len(hider.feed(part))
    assert num >= 39 * 65_536 - (1 << 20) and num + len(hider.rest()) == 40 * 65_536
