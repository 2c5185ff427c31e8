"""Names of pools that commands write."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from headway.core.fleet import pool_name


@given(st.lists(st.text(max_size=70) | st.from_regex(r"[a-b][.-]2?", fullmatch=True), max_size=12))
@example(["m" * 60 + "-0", "m" * 60 + "-1", "m" * 60 + "-combo"])
@example(["llama-3.1", "llama-3-1", "llama-3-1-2"])
def test_names_are_new_and_can_be_deployed(texts: list[str]) -> None:
    """`headway export` takes them: a DNS label, with room for what it adds."""
    taken: set[str] = set()
    names = [pool_name(text, taken) for text in texts]
    assert len({*names}) == len(names) and taken == {*names}
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?", name) for name in names)
