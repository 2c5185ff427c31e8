"""The `workload:` section: what a user may write, and the source that comes of it."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headway.core.errors import HeadwayError
from headway.core.request import Request
from headway.workload import arrivals as arrivals_module
from headway.workload import generate as generate_module
from headway.workload import lengths as lengths_module
from headway.workload import spec as spec_module
from headway.workload.describe import describe
from headway.workload.files import to_csv, to_parquet
from headway.workload.generate import build, generate
from headway.workload.read import read
from headway.workload.sessions import Sessions
from headway.workload.sources import ClosedLoop, TraceSource
from headway.workload.spec import WorkloadSpec, builtin_workloads, resolved
from headway.workload.table import Workload

SYNTHETIC = """
num_requests: 5000
arrivals: {kind: poisson, rate: 8}
prompt_tokens: {kind: lognormal, mean: 1000, cv: 1.0}
output_tokens: 200
"""


def spec(text: str) -> WorkloadSpec:
    return msgspec.yaml.decode(text, type=WorkloadSpec)


def made(text: str, seed: int = 1) -> Workload:
    return generate(spec(text), seed)


def issue(source: Any) -> list[Request]:
    requests = []
    while source.peek_s() is not None:
        requests.append(source.pop(Request))
    return requests


def test_a_short_section_makes_a_trace() -> None:
    workload = made(SYNTHETIC).validate()
    assert len(workload) == 5000 and set(workload.columns) == {"arrival_s", "prompt_tokens", "output_tokens"}
    source = build(spec(SYNTHETIC), 1)
    assert isinstance(source, TraceSource)
    assert issue(source) == list(starmap(Request, workload.tuples()))


def test_lengths_as_numbers_and_names() -> None:
    workload = made("{duration_s: 100, arrivals: 8, prompt_tokens: azure-conv, output_tokens: azure-conv}")
    assert 700 < len(workload) < 900 and workload.arrival_s[-1] < 100
    assert (made("{num_requests: 9, arrivals: 8, prompt_tokens: 5, output_tokens: 6}").prompt_tokens == 5).all()


def test_a_seed_gives_one_workload_and_changing_one_thing_leaves_the_others() -> None:
    one, again, other = made(SYNTHETIC), made(SYNTHETIC), made(SYNTHETIC, seed=2)
    for name in one.columns:
        assert (one.columns[name] == again.columns[name]).all()
    assert (one.arrival_s != other.arrival_s).any() and (one.prompt_tokens != other.prompt_tokens).any()
    faster = made(SYNTHETIC.replace("rate: 8", "rate: 16"))
    assert np.allclose(faster.arrival_s * 2, one.arrival_s)
    assert (faster.prompt_tokens == one.prompt_tokens).all()
    longer = made(SYNTHETIC.replace("5000", "6000"))
    assert (longer.arrival_s[:5000] == one.arrival_s).all()
    assert (longer.prompt_tokens[:5000] == one.prompt_tokens).all()
    answered = made(SYNTHETIC.replace("200", "{kind: uniform, min: 1, max: 9}"))
    assert (answered.arrival_s == one.arrival_s).all() and (answered.prompt_tokens == one.prompt_tokens).all()
    tiered = made(SYNTHETIC + "tiers: [{tier: 0}, {tier: 1}]\nmodels: {a: 1, b: 2}\ntimeout_s: 5\n")
    assert (tiered.arrival_s == one.arrival_s).all()


def test_tiers_models_regions_slo_and_time_outs() -> None:
    workload = made(
        SYNTHETIC
        + """
slo: {ttft_s: 4, e2e_s: 60}
tiers:
  - {tier: 0, share: 1, ttft_s: 1, deadline_after_s: 3}
  - {tier: 2, share: 3, timeout_s: 20}
models: {big: 1, small: 1}
regions: eu-west
timeout_s: 90
"""
    )
    rows = list(starmap(Request, workload.tuples()))
    assert {(r.tier, r.slo_ttft_s, r.slo_e2e_s, r.timeout_s, r.region) for r in rows} == {
        (0, 1.0, 60.0, 90.0, "eu-west"),
        (2, 4.0, 60.0, 20.0, "eu-west"),
    }
    assert np.mean([r.tier == 2 for r in rows]) == pytest.approx(0.75, abs=0.03)
    assert np.mean([r.model == "big" for r in rows]) == pytest.approx(0.5, abs=0.03)
    assert all((r.deadline_s is None) == (r.tier == 2) for r in rows)
    assert all(r.deadline_s is None or r.deadline_s == pytest.approx(r.arrival_s + 3) for r in rows)


def test_reasoning_comes_on_top_of_the_answer() -> None:
    workload = made(SYNTHETIC + "reasoning_tokens: servegen-reasoning\n").validate()
    assert (workload.output_tokens - workload.column("reasoning_tokens") == 200).all()


def test_prefix_groups_share_their_beginning() -> None:
    text = (
        SYNTHETIC + "prefixes: {num_groups: 4, prefix_tokens: {kind: uniform, min: 50, max: 90}, share: 0.8, skew: 1}"
    )
    rows = list(starmap(Request, made(text).validate().tuples()))
    bare = list(starmap(Request, made(SYNTHETIC).tuples()))
    seen: dict[int, list[int]] = {}
    for row, without in zip(rows, bare, strict=True):
        assert row.prompt_tokens == without.prompt_tokens + sum(s.tokens for s in row.prefix)
        for segment in row.prefix:
            seen.setdefault(segment.id, []).append(segment.tokens)
    assert len(seen) == 4 and all(len(set(tokens)) == 1 for tokens in seen.values())
    assert sum(map(len, seen.values())) / 5000 == pytest.approx(0.8, abs=0.03)
    assert len(seen[0]) / len(seen[3]) == pytest.approx(4, rel=0.25)


SESSIONS = SYNTHETIC + "sessions: {turns: {kind: geometric, mean: 4}, think_s: 10}\n"


def test_sessions_react_and_flatten() -> None:
    source = build(spec(SESSIONS), 1)
    assert isinstance(source, Sessions) and source.num_requests == 5000
    flat = made(SESSIONS).validate()
    assert len(flat) == 5000 and "stand their think time apart" in flat.notes[0]
    sessions = describe(flat).num_sessions
    assert 5000 / sessions == pytest.approx(4, rel=0.1)
    starts = flat.take(np.unique(flat.column("session_id"), return_index=True)[1])
    assert np.allclose(starts.arrival_s, made(SYNTHETIC).arrival_s[:sessions])


def test_sessions_keep_one_tier_and_one_system_prompt_each() -> None:
    text = SESSIONS + "tiers: [{tier: 0}, {tier: 1}]\nprefixes: {num_groups: 3, prefix_tokens: 70}\n"
    flat = made(text).validate()
    pairs = {(r.session_id, r.tier, r.prefix[0]) for r in starmap(Request, flat.tuples())}
    assert len(pairs) == describe(flat).num_sessions
    assert {p[2].id for p in pairs} == {0, 1, 2} and {p[2].tokens for p in pairs} == {70}
    assert len({p[1] for p in pairs}) == 2


def test_a_duration_bounds_session_starts() -> None:
    text = SESSIONS.replace("num_requests: 5000", "duration_s: 50")
    flat = made(text)
    first = np.unique(flat.column("session_id"), return_index=True)[1]
    assert flat.arrival_s[first].max() < 50 and 300 < len(first) < 500


def test_a_closed_loop_needs_no_arrivals() -> None:
    source = build(spec("{num_requests: 9, concurrency: 4, prompt_tokens: 5, output_tokens: 6, think_s: 2}"), 1)
    assert isinstance(source, ClosedLoop)
    assert [r.arrival_s for r in issue(source)] == [0.0] * 4


OWN = "arrival_s,prompt_tokens,output_tokens,model\n" + "".join(f"{i},{i + 1},5,m\n" for i in range(10))


def test_traces_by_path_or_in_full(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(OWN)
    source = build(spec("trace: t.csv"), 1, tmp_path)
    assert [r.model for r in issue(source)] == ["m"] * 10
    rest = "limit: 8, from_s: 2, to_s: 6, rate_scale: 2, models: {m: llama}"
    part = issue(build(spec(f"{{trace: {{path: t.csv, {rest}}}, timeout_s: 3}}"), 1, tmp_path))
    assert [(r.arrival_s, r.prompt_tokens, r.model, r.timeout_s) for r in part] == [
        (0.0, 3, "llama", 3.0),
        (0.5, 4, "llama", 3.0),
        (1.0, 5, "llama", 3.0),
        (1.5, 6, "llama", 3.0),
    ]
    loop = build(spec("{trace: t.csv, concurrency: 2, models: m}"), 1, tmp_path)
    assert isinstance(loop, ClosedLoop) and loop.pop(Request).model == "m"
    with pytest.raises(
        HeadwayError, match="the trace has requests of its own models: unknown model 'other'; one of: m"
    ):
        build(spec("{trace: t.csv, concurrency: 2, models: other}"), 1, tmp_path)
    with pytest.raises(HeadwayError, match=r"the trace's model 'm' is missing"):
        build(spec("trace: {path: t.csv, models: {x: y}}"), 1, tmp_path)
    with pytest.raises(HeadwayError, match="no request arrives"):
        build(spec("trace: {path: t.csv, from_s: 100}"), 1, tmp_path)
    with pytest.raises(HeadwayError, match="no such file"):
        build(spec("trace: u.csv"), 1, tmp_path)


def test_model_names_of_other_peoples_traces_are_left_out_unless_mapped(tmp_path: Path) -> None:
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    (tmp_path / "b.csv").write_text(header + "0,GPT-4,1,2,3,API log\n1,ChatGPT,1,2,3,API log\n")
    plain = generate(spec("trace: b.csv"), 1, tmp_path)
    assert [r.model for r in starmap(Request, plain.tuples())] == ["", ""] and "GPT-4, ChatGPT" in plain.notes[-1]
    mapped = generate(spec("trace: {path: b.csv, models: {GPT-4: x, ChatGPT: x}}"), 1, tmp_path)
    assert [r.model for r in starmap(Request, mapped.tuples())] == ["x", "x"] and mapped.models == ("x",)


def test_arrivals_of_a_trace_with_other_lengths(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(OWN)
    rest = "prompt_tokens: 100, output_tokens: 5"
    replay = "arrivals: {kind: replay, path: t.csv, rate_scale: 4}"
    assert generate(spec(f"{{{replay}, {rest}}}"), 1, tmp_path).arrival_s.tolist() == [i / 4 for i in range(10)]
    assert len(generate(spec(f"{{{replay}, num_requests: 3, {rest}}}"), 1, tmp_path)) == 3
    with pytest.raises(HeadwayError, match=r"num_requests: 11; the trace t\.csv has 10 arrivals"):
        generate(spec(f"{{{replay}, num_requests: 11, {rest}}}"), 1, tmp_path)


REASONING = "input_tokens,reason_tokens,answer_tokens\n" + "".join(f"{i + 1},{2 * i},{i + 3}\n" for i in range(10))
LENGTHS_ONLY = {
    "servegen.csv": REASONING,
    "own.csv": "prompt_tokens,output_tokens,reasoning_tokens\n"
    + "".join(f"{i + 1},{3 * i + 3},{2 * i}\n" for i in range(10)),
}


@pytest.mark.parametrize("file", LENGTHS_ONLY)
def test_trace_of_lengths_takes_arrivals_from_the_section(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(LENGTHS_ONLY[file])
    still = generate(spec(f"trace: {file}"), 1, tmp_path)
    assert (still.arrival_s == 0).all() and "no arrival times" in still.notes[-1]
    moved = generate(spec(f"{{trace: {file}, arrivals: 8}}"), 1, tmp_path)
    assert moved.arrival_s.tolist() == made(SYNTHETIC).arrival_s[:10].tolist()
    assert moved.prompt_tokens.tolist() == list(range(1, 11))
    assert moved.column("reasoning_tokens").tolist() == list(range(0, 20, 2))
    assert (moved.output_tokens - moved.column("reasoning_tokens")).tolist() == list(range(3, 13))
    few = generate(spec(f"{{trace: {{path: {file}, rate_scale: 2}}, arrivals: 8, num_requests: 4}}"), 1, tmp_path)
    assert np.allclose(few.arrival_s * 2, moved.arrival_s[:4]) and few.prompt_tokens.tolist() == [1, 2, 3, 4]
    short = generate(spec(f"{{trace: {file}, arrivals: 8, duration_s: 0.5}}"), 1, tmp_path)
    assert len(short) == int((moved.arrival_s < 0.5).sum())
    with pytest.raises(HeadwayError, match=rf"num_requests: 11; the trace {file} has 10 requests"):
        generate(spec(f"{{trace: {file}, arrivals: 8, num_requests: 11}}"), 1, tmp_path)
    with pytest.raises(HeadwayError, match=r"the trace \S+ has 10 requests"):
        generate(spec(f"{{trace: {file}, arrivals: 8, num_requests: 20}}"), 1, tmp_path)


def test_a_trace_can_take_its_arrivals_from_another(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(OWN)
    (tmp_path / "l.csv").write_text(REASONING.replace("10,18,12\n", ""))
    both = generate(spec("{trace: l.csv, arrivals: {kind: replay, path: t.csv}}"), 1, tmp_path)
    assert both.arrival_s.tolist() == list(range(9)) and both.prompt_tokens.tolist() == list(range(1, 10))
    windowed = "{trace: {path: t.csv, from_s: 4}, arrivals: 2, slo: {ttft_s: 1}}"
    late = generate(spec(windowed), 1, tmp_path)
    assert late.prompt_tokens.tolist() == [5, 6, 7, 8, 9, 10] and (late.column("slo_ttft_s") == 1).all()


@pytest.mark.parametrize("name", builtin_workloads())
def test_builtin_workloads_make_sense_and_can_be_changed(name: str) -> None:
    text = f"{{builtin: {name}, num_requests: 300}}"
    assert len(made(text).validate()) == 300
    assert len(issue(build(spec(text), 1))) > 0
    assert resolved(spec(f"{{builtin: {name}, duration_s: 9}}")).num_requests is None
    assert isinstance(build(spec(f"{{builtin: {name}, num_requests: 9, concurrency: 2}}"), 1), ClosedLoop)
    faster = resolved(spec(f"{{builtin: {name}, arrivals: 99}}"))
    assert faster.arrivals == 99
    kinds = faster.mix if faster.mix is not None else (faster,)
    kinds = faster.demand.lengths.values() if faster.demand is not None else kinds
    assert all(kind.prompt_tokens is not None and kind.output_tokens is not None for kind in kinds)


def test_unknown_builtin_lists_valid_names() -> None:
    with pytest.raises(HeadwayError, match=r"unknown builtin workload 'chatt'; did you mean 'chat'\?"):
        build(spec("builtin: chatt"), 1)


WRONG = [
    ("{}", "expected trace, builtin, mix, or prompt_tokens and output_tokens"),
    ("{arrivals: 8, prompt_tokens: 5, output_tokens: 5}", "num_requests: missing"),
    ("{num_requests: 5, prompt_tokens: 5, output_tokens: 5}", "arrivals: missing"),
    (SYNTHETIC + "trace: x.csv", "prompt_tokens: not with a trace"),
    ("{trace: x.csv, num_requests: 8}", "num_requests: not with a trace; use trace.limit, or give arrivals too"),
    ("{trace: x.csv, duration_s: 8}", "duration_s: not with a trace; use trace.to_s"),
    ("{trace: x.csv, arrivals: 8, correlation: 0.5}", "correlation: not with a trace"),
    ("{trace: x.csv, arrivals: 8, mix: [{builtin: chat}]}", "mix: not with a trace"),
    ("{trace: x.csv, builtin: chat}", "trace and builtin"),
    ("{builtin: chat, num_requests: 0}", "num_requests: 0"),
    (SYNTHETIC.replace("200", "0"), "output_tokens: 0; expected 1 to 10,000,000"),
    (SYNTHETIC.replace("200", "20000000"), "output_tokens: 20000000"),
    (SYNTHETIC.replace("200", "azure-con"), "did you mean 'azure-conv'"),
    (SYNTHETIC.replace("200", ".nan"), "output_tokens"),
    (SYNTHETIC.replace("rate: 8", "rate: .nan"), "rate: nan; expected a number above 0"),
    (SYNTHETIC.replace("rate: 8", "rat: 8"), "unknown field `rat`"),
    (SYNTHETIC.replace("{kind: poisson, rate: 8}", "-1"), "rate: -1"),
    (SYNTHETIC + "tiers: [{tier: 0}, {tier: 0}]", "its own number"),
    (SYNTHETIC + "tiers: []", "tiers: expected one or more"),
    (SYNTHETIC + "tiers: {mix: enterprise, num_tiers: 11}", "num_tiers: 11; expected 1 to 10"),
    (SYNTHETIC + "tiers: {mix: enterprise, num_tiers: 0}", "num_tiers: 0; expected 1 to 10"),
    (SYNTHETIC + "tiers: {mix: gausian, num_tiers: 4}", "gausian"),
    (SYNTHETIC + "tiers: {mix: gaussian}", "num_tiers"),
    (SYNTHETIC + "correlation: -0.1", "correlation: -0.1; expected 0 to 1"),
    (SYNTHETIC + "correlation: 1.5", "correlation: 1.5; expected 0 to 1"),
    (SYNTHETIC + "mix: [{builtin: chat}]", "mix and prompt_tokens: expected one of them"),
    ("{num_requests: 5, arrivals: 8, mix: []}", "mix: expected one part or more"),
    ("{num_requests: 5, arrivals: 8, mix: [{prompt_tokens: 3}]}", "expected builtin, or prompt_tokens and output"),
    ("{num_requests: 5, arrivals: 8, mix: [{builtin: chat, share: -1}]}", "share: -1"),
    ("{num_requests: 5, arrivals: 8, mix: [{builtin: chat, output_tokens: 0}]}", "output_tokens: 0"),
    (SYNTHETIC.replace("200", "{kind: uniform, min: 128, max: 300, step: 128}"), "step: 128"),
    (SYNTHETIC + "tiers: [{tier: -1}]", "tier: -1"),
    (SYNTHETIC + "timeout_s: 0", "timeout_s: 0"),
    (SYNTHETIC + "slo: {ttft_s: -2}", "ttft_s: -2"),
    (SYNTHETIC + "think_s: 3", "together with concurrency"),
    (SYNTHETIC + "prefixes: {num_groups: 2, prefix_tokens: 3, share: 2}", "share: 2"),
    (SESSIONS + "concurrency: 3", "concurrency and sessions"),
    (SESSIONS.replace("{kind: geometric, mean: 4}", "azure-conv"), "turns: 'azure-conv'"),
    ("trace: {path: x, from_s: 3, to_s: 2}", "from_s 3.0, to_s 2.0"),
    ("trace: {path: x, limit: 0}", "limit: 0"),
    ("trace: {pth: x}", "unknown field `pth`"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_invalid_sections_are_errors(text: str, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        spec(text)
    assert message in str(error.value)


def test_shares_that_are_all_zero_are_an_error() -> None:
    with pytest.raises(HeadwayError, match="models: shares"):
        made(SYNTHETIC + "models: {a: 0}")


def test_nothing_arriving_is_an_error() -> None:
    with pytest.raises(HeadwayError, match=r"nothing arrives within 0\.001 s"):
        made("{duration_s: 0.001, arrivals: 0.1, prompt_tokens: 1, output_tokens: 1}")


def test_every_key_of_the_section_has_a_docstring_and_a_place_in_the_schema() -> None:
    schema = msgspec.json.schema(WorkloadSpec)["$defs"]
    assert set(schema["WorkloadSpec"]["properties"]) == set(WorkloadSpec.__struct_fields__)
    modules = (spec_module, arrivals_module, lengths_module)
    for tree in (ast.parse(inspect.getsource(module)) for module in modules):
        for struct in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in schema):
            for field, after in pairwise(struct.body):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(after, ast.Expr), f"{struct.name}.{ast.unparse(field.target)}"


def test_generated_workload_round_trips(tmp_path: Path) -> None:
    workload = generate(spec("{builtin: chat-sessions, num_requests: 500}"), 4)
    to_csv(workload, tmp_path / "w.csv.gz")
    assert list(starmap(Request, read(tmp_path / "w.csv.gz").tuples())) == list(starmap(Request, workload.tuples()))
    to_parquet(workload, tmp_path / "w.parquet")
    again = read(tmp_path / "w.parquet")
    assert (
        list(starmap(Request, again.tuples())) == list(starmap(Request, workload.tuples()))
        and again.notes == workload.notes
    )


def test_more_than_memory_holds_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room for 8 GB")

    monkeypatch.setattr(generate_module, "_rows", full)
    with pytest.raises(HeadwayError, match=r"does not fit in memory \(no room for 8 GB\)"):
        made(SYNTHETIC)
    with pytest.raises(msgspec.ValidationError, match="num_requests: 1000000000000000; expected at most"):
        spec(SYNTHETIC.replace("5000", "1000000000000000"))
