"""Values of options that several commands share."""

from __future__ import annotations

import pytest

from headway.cli.flags import slo_of
from headway.cli.output import command_line
from headway.core.errors import HeadwayError


def test_slos_are_read_from_words() -> None:
    assert slo_of("ttft=2, tpot=0.05,e2e=30") == {"ttft_s": 2.0, "tpot_s": 0.05, "e2e_s": 30.0}
    for text, message in (
        ("tft=2", "--slo: .*did you mean 'ttft'"),
        ("ttft=0", "more than 0 seconds"),
        ("ttft", "more than 0 seconds"),
        (",", "nothing"),
    ):
        with pytest.raises(HeadwayError, match=message):
            slo_of(text)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["load", "host", "--api-key", "one two", "--sweep"], "headway load host --api-key ... --sweep"),
        (["load", "--api-key=secret", "a b"], "headway load --api-key=... 'a b'"),
        (["load", "--api-key"], "headway load --api-key"),
    ],
)
def test_a_page_names_the_command_without_its_key(
    words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["headway", *words])
    assert command_line() == shown
