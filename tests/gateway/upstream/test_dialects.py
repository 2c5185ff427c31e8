"""Engines' metrics pages and names."""

from __future__ import annotations

from random import Random

import pytest

from headway.gateway.upstream import samples
from headway.gateway.upstream.dialects import ADAPTERS, Load, LoadReader, api_of, parse_load


def test_samples_of_all_ranks_add_up_and_missing_metrics_are_unknown() -> None:
    page = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_running_total 99
vllm:gpu_cache_usage_perc{engine="0"} 0.25
"""
    assert parse_load(ADAPTERS["vllm"], page) == Load(running=7, waiting=None, kv_share=0.25, num_ranks=2)
    assert parse_load(ADAPTERS["sglang"], page) == Load()


PAGE = "vllm:num_requests_running {}\nvllm:num_requests_waiting {}\nvllm:kv_cache_usage_perc {}\n"


@pytest.mark.parametrize(
    ("values", "load"),
    [(("e", "--", "1e"), Load()), (("1e999", "-3", "NaN"), Load()), (("3.0", "+4", "17"), Load(3, 4, 1.0))],
)
def test_invalid_samples_are_unknown(values: tuple[str, str, str], load: Load) -> None:
    assert parse_load(ADAPTERS["vllm"], PAGE.format(*values)) == load


@pytest.mark.parametrize(
    ("engine", "api"), [("vllm-0.15", "vllm"), ("sglang", "sglang"), ("llama.cpp", "llama.cpp"), ("orca", "openai")]
)
def test_the_api_of_a_catalogs_engine(engine: str, api: str) -> None:
    assert api_of(engine) == api


NAMES = {"m", "alias"}
CLEAR = {
    "SGLang's total beside parts by priority": (
        'x{model_name="m",priority=""} 6\nx{model_name="m",priority="0"} 4\nx{model_name="m",priority="5"} 2',
        [6.0],
    ),
    "parts by priority alone": ('x{priority="0"} 4\nx{priority="5"} 2', [6.0]),
    "a total without the label": ('x{} 6\nx{priority="0"} 4\nx{priority="5"} 2', [6.0]),
    "totals and parts of two ranks": (
        'x{dp_rank="0",priority=""} 6\nx{dp_rank="0",priority="1"} 6\nx{dp_rank="1",priority=""} 3',
        [6.0, 3.0],
    ),
    "several models": ('x{model_name="other"} 40\nx{model_name="m"} 3', [3.0]),
    "several models, two ranks": (
        'x{engine="0",model_name="b"} 9\nx{engine="0",model_name="alias"} 3\nx{engine="1",model_name="alias"} 1\n'
        'x{engine="1",model_name="b"} 9',
        [3.0, 1.0],
    ),
    "another name for the only model": ('x{model_name="/models/m"} 3', [3.0]),
    "tensor-parallel copies": ('x{tp_rank="10"} 5\nx{tp_rank="2"} 4\nx{tp_rank="0"} 4', [4.0]),
    "copies of two ranks": ('x{tp_rank="0",dp_rank="0"} 5\nx{tp_rank="1",dp_rank="1"} 4', [5.0, 4.0]),
    "an unknown label with one value": ('x{pod="a",engine="0"} 5\nx{pod="a",engine="1"} 4', [5.0, 4.0]),
    "an unknown label that goes with the rank": ('x{pid="7",engine="0"} 5\nx{pid="9",engine="1"} 4', [5.0, 4.0]),
    "an unknown label with a total": ('x{class=""} 5\nx{class="a"} 3\nx{class="b"} 2', [5.0]),
    "braces and quotes in a label": ('x{note="a}b\\"c",engine="0"} 5\nx{note="a}b\\"c",engine="1"} 1', [5.0, 1.0]),
    "a time after the value": ("x 5 1700000000000", [5.0]),
    "the same sample twice": ('x{a="b"} 5\nx{a="b"} 6', [6.0]),
}


@pytest.mark.parametrize(("page", "by_rank"), CLEAR.values(), ids=CLEAR)
def test_requests_are_counted_once(page: str, by_rank: list[float]) -> None:
    for lines in (page.split("\n"), page.split("\n")[::-1]):
        if page.startswith('x{a="b"}'):
            lines = page.split("\n")
        found = samples.values(("y", "x"), "\n".join(["# TYPE x gauge", *lines, "x_total{} 99"]), NAMES)
        assert (sorted(found.by_rank), found.unclear) == (sorted(by_rank), "")


UNCLEAR = {
    "pid": 'x{pid="7"} 5\nx{pid="9"} 4',
    "class": 'x{class=""} 9\nx{class="a"} 3\nx{class="b"} 2',
    "model_name": 'x{model_name="a"} 3\nx{model_name="b"} 2',
    "tenant": 'x{tenant="a",priority=""} 3\nx{tenant="b",priority=""} 2',
}


@pytest.mark.parametrize(("label", "page"), UNCLEAR.items(), ids=UNCLEAR)
def test_samples_that_may_be_anything_are_unknown_and_named(label: str, page: str) -> None:
    found = samples.values(("x",), page, NAMES)
    assert found.total is None and found.mean is None and found.unclear == label
    load = parse_load(ADAPTERS["vllm"], page.replace("x{", "vllm:num_requests_waiting{"), NAMES)
    assert load == Load(unclear=(f"vllm:num_requests_waiting{{{label}}}",))


@pytest.mark.parametrize("api", sorted(ADAPTERS))
def test_a_reader_gives_the_load_of_each_page(api: str) -> None:
    """Whatever pages came before, and whatever changed: values, labels, names of the model, or other lines."""
    adapter, rng = ADAPTERS[api], Random(api)
    names = (*adapter.running, *adapter.waiting, *adapter.kv_share, *adapter.host_share, *(adapter.kv_blocks or ()))
    names += tuple(filter(None, (adapter.loras, adapter.ordering)))
    reader = LoadReader(adapter)

    def some_lines() -> list[str]:
        lines = [f'{name}{{model_name="{rng.choice("ab")}"}} {rng.choice("01")}' for name in names]
        lines = [line for line in lines if rng.random() < 0.7]
        others = ["other 1", "# TYPE x gauge", *(f"{odd}{name} 7" for name in names for odd in ("x", "# HELP ", " "))]
        return rng.sample(lines + others, rng.randrange(len(lines + others) + 1))

    rest = some_lines()
    for _ in range(400):
        if rng.random() < 0.5:  # else only the beginning of the page changes
            rest = some_lines()
        page, models = [*some_lines(), *rest], {rng.choice("ab")}
        load = reader.read("\n".join(page).encode(), models)
        assert load == parse_load(adapter, "\n".join(page), models)
        assert load == parse_load(adapter, "\n".join(line for line in page if line.startswith(names)), models)
