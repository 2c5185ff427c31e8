"""What clients see when Envoy, the picker or an engine is gone: the table of docs/envoy.md, made and compared.

`bench/envoy_faults.py --write` puts it there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("grpc")
pytest.importorskip("httptools")

import envoy_faults
import envoys


@pytest.mark.ci
def test_what_clients_see_is_what_the_page_says(tmp_path: Path) -> None:
    envoys.binary()
    table = envoy_faults.made(tmp_path)
    found = envoy_faults.TABLE.search(envoys.PAGE.read_text(encoding="utf-8"))
    assert found is not None and found[0] == table, table
