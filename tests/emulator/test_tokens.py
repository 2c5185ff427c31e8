"""The emulated engine's tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.emulator import tokens


@given(st.integers(1, 60), st.integers(0, 30), st.lists(st.integers(1, 9), max_size=8), st.booleans())
def test_a_continued_answer_is_the_uninterrupted_one(
    output_tokens: int, reasoning_tokens: int, parts: list[int], is_chat: bool
) -> None:
    """A writer that is given the tokens so far writes the same next tokens, and ends at the same token."""
    messages = [{"role": "user", "content": "what is w77"}]
    prompt = tokens.chat(messages, reasoning_tokens > 0, False) if is_chat else tokens.encode("once upon w9")
    straight = tokens.TokenSequence(prompt, output_tokens, reasoning_tokens)
    whole = straight.extend(60)
    done: list[int] = []
    for part in parts:
        again = tokens.TokenSequence([*prompt, *done], output_tokens, reasoning_tokens)
        assert again.left is None or again.left == max(output_tokens - len(done), 1)
        done += again.extend(part)
    assert done == whole[: len(done)] if len(done) <= 60 else done[:60] == whole
    assert tokens.encode(tokens.decode(whole)) == whole
    if is_chat and reasoning_tokens:
        assert whole.index(tokens.THINK_END) == reasoning_tokens - 1
