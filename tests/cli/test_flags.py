"""Values of options that several commands share."""

from __future__ import annotations

import pytest

from headway.cli.flags import slo_of
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
