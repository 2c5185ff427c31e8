"""Copies of streams: their parts, their keys, and the memory that all of them take."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.gateway.scheduling import stream_copy
from headway.gateway.scheduling.stream_copy import KEEP_S, StreamCopies, StreamCopy, StreamKey, StreamPart, stream_key

ONCE, ALWAYS = StreamKey(b"once", False), StreamKey(b"always", True)


@dataclass
class Answer:
    tokens: int = 0
    token_ids: list[int] | None = field(default_factory=list)
    prompt_ids: list[int] | None = None

    def grow(self, *ids: int) -> Answer:
        self.tokens += len(ids)
        if self.token_ids is not None:
            self.token_ids += ids
        return self


def test_parts_that_are_taken_out_make_the_same_copy_elsewhere() -> None:
    answer, here, there = Answer(), StreamCopy(), StreamCopy()
    here.append(b"a", answer.grow(1, 2))
    answer.prompt_ids = [7, 8]
    here.append(b"b", answer.grow(3))
    there.extend(here.take())
    here.append(b"c", answer.grow(4))
    there.extend(here.take())
    part = there.as_part()
    assert (part.data, part.tokens, part.token_ids, part.prompt_ids) == (b"abc", 4, [1, 2, 3, 4], [7, 8])
    answer.token_ids = None  # an engine that does not report them
    here.append(b"d", answer)
    there.extend(here.take())
    assert there.token_ids is None and bytes(there.data) == b"abcd"


def test_a_retry_continues_its_copy_once() -> None:
    now = 0.0
    copies, answer = StreamCopies(lambda: now), Answer()
    copy, restored = copies.begin(ONCE)
    assert copy is not None and restored is None
    copy.append(b"data", answer.grow(1))
    assert copies.begin(ONCE)[1] is None  # while it runs, another request is another one
    copies.end(ONCE, copy, is_finished=False)
    now = KEEP_S - 1
    again, restored = copies.begin(ONCE)
    assert again is copy and restored is not None and restored.data == b"data"
    again.append(b" more", Answer(2, [1, 2]))
    copies.end(ONCE, again, is_finished=False)
    assert copies.begin(ONCE)[1] == stream_copy.StreamPart(b"data more", 2, [1, 2], None)
    copies.end(ONCE, again, is_finished=False)
    now += KEEP_S
    assert copies.begin(ONCE)[1] is None and copies.num_bytes == 0


def test_a_complete_answer_is_kept_for_an_idempotency_key_only() -> None:
    copies = StreamCopies(lambda: 0.0)
    for key, is_kept in ((ONCE, False), (ALWAYS, True)):
        copy, _ = copies.begin(key)
        assert copy is not None
        copy.append(b"data", Answer().grow(1))
        copies.end(key, copy, is_finished=True)
        assert (copies.begin(key)[1] is not None) is is_kept
    copies.end(None, None, is_finished=True)
    assert copies.begin(None) == (None, None)


def test_memory_is_bounded() -> None:
    copies = StreamCopies(lambda: 0.0, max_bytes=3000)
    keys = [StreamKey(b"%d" % i, True) for i in range(10)]
    for key in keys:
        copy, _ = copies.begin(key)
        assert copy is not None
        copy.append(b"x" * 900, Answer().grow(1))
        copies.end(key, copy, is_finished=True)
        assert copies.num_bytes <= 3000
    assert [copies.begin(key)[1] is not None for key in keys] == [False] * 7 + [True] * 3
    running = [copies.begin(StreamKey(b"r%d" % i, True))[0] for i in range(4)]
    for copy in running:
        assert copy is not None
        copy.append(b"x" * 900, Answer().grow(1))
    assert [copy.is_usable for copy in running if copy] == [False] * 4  # three others are still running
    large = StreamCopy()
    large.append(b"x" * (stream_copy.MAX_STREAM_BYTES + 1), Answer().grow(1))
    assert not large.is_usable and not large.data
    large.append(b"x", Answer().grow(1))
    assert not large.data


def test_keys_are_of_one_client_one_body_and_one_name() -> None:
    named = {"idempotency-key": "a", "x-request-id": "b"}
    key = stream_key("me", named, "/v1/completions", b"{}")
    assert key is not None and key.keeps_finished and key == stream_key("me", named, "/v1/completions", b"{}")
    others = [
        stream_key("you", named, "/v1/completions", b"{}"),
        stream_key("me", {"idempotency-key": "b"}, "/v1/completions", b"{}"),
        stream_key("me", named, "/v1/chat/completions", b"{}"),
        stream_key("me", named, "/v1/completions", b"{ }"),
        stream_key("me", {"x-request-id": "a"}, "/v1/completions", b"{}"),
    ]
    assert len({other.digest for other in [key, *others] if other}) == 6
    assert not (others[4] and others[4].keeps_finished)
    assert stream_key("me", {}, "/", b"") is None and stream_key("me", {"x-request-id": "a" * 256}, "/", b"") is None


def test_a_listener_hears_what_becomes_of_a_copy_and_others_streams_are_adopted() -> None:
    heard: list[object] = []

    class Listener:
        def added(self, part: StreamPart) -> None:
            heard.append((part.data, part.tokens))

        def kept(self) -> None:
            heard.append("kept")

        def resumed(self) -> None:
            heard.append("resumed")

        def dropped(self) -> None:
            heard.append("dropped")

    copies = StreamCopies(lambda: 0.0)
    copies.listen = lambda digest: Listener()
    copy, _ = copies.begin(ONCE)
    assert copy is not None
    copy.append(b"a", Answer().grow(1))
    copies.end(ONCE, copy, is_finished=False)
    assert copies.has(ONCE.digest)
    copies.begin(ONCE)
    copies.end(ONCE, copy, is_finished=True)
    assert heard == [(b"a", 1), "kept", "resumed", "dropped"]
    copies.adopt(ALWAYS.digest, [StreamPart(b"x", 2, [1, 2], [9]), StreamPart(b"y", 3, [3], None)])
    _, restored = copies.begin(ALWAYS)
    assert restored == StreamPart(b"xy", 3, [1, 2, 3], [9]) and heard[4:] == ["resumed"]
    copies.adopt(ONCE.digest, [StreamPart(b"x", 0, [], None)])  # it had brought nothing
    assert not copies.has(ONCE.digest)
