"""Score tables: thresholds, the generators against Cascadia's Table 2, readers, and judges that err."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.catalog import model
from headway.core.errors import HeadwayError
from headway.workload.quality import Scores, processed, with_scores
from headway.workload.quality_judges import GPT_4O_MINI, JudgeNoise, LinearJudge, misjudged, trained
from headway.workload.quality_source import AnswerLayout, read_scores
from headway.workload.quality_traces import CASCADES, TABLE_2, TRACES, Table2Row, generate_scores
from headway.workload.table import Workload

NAN = float("nan")


def table(scores: list[list[float]]) -> Scores:
    values = np.array(scores, "f8")
    names = tuple(f"m{i}" for i in range(values.shape[1]))
    return Scores(names, values, np.full(values.shape, 10), np.full(len(values), 5))


def final_of(row: list[float], thresholds: list[float]) -> int:
    """One request, by hand."""
    for stage, threshold in enumerate(thresholds):
        if row[stage] == row[stage] and row[stage] >= threshold:
            return stage
    return len(thresholds)


ROWS = st.lists(st.lists(st.one_of(st.integers(0, 100), st.just(NAN)), min_size=3, max_size=3), min_size=1, max_size=9)
LEVELS = st.lists(st.integers(0, 101), min_size=2, max_size=2)


@given(ROWS, LEVELS)
def test_thresholds_decide_the_final_stage(rows: list[list[float]], levels: list[float]) -> None:
    scores = table(rows)
    final = [final_of(row, levels) for row in rows]
    assert scores.final_stage(levels).tolist() == final
    assert scores.ratios(levels) == pytest.approx([sum(f >= i for f in final) / len(rows) for i in range(3)])
    given_ = [row[f] for row, f in zip(rows, final, strict=True) if row[f] == row[f]]
    quality = scores.quality(levels)
    assert quality == (pytest.approx(sum(given_) / len(given_)) if given_ else None)


@given(ROWS, LEVELS, st.integers(0, 1), st.integers(1, 50))
def test_higher_threshold_never_escalates_fewer_requests(
    rows: list[list[float]], levels: list[float], which: int, more: int
) -> None:
    scores, higher = table(rows), list(levels)
    higher[which] += more
    assert all(a <= b for a, b in zip(scores.ratios(levels), scores.ratios(higher), strict=True))


def test_one_model_and_thresholds_at_the_ends() -> None:
    one = table([[10.0], [50.0]])
    assert one.ratios(()) == (1.0,) and one.quality(()) == 30.0
    two = table([[0.0, 90.0], [100.0, 80.0]])
    assert two.ratios((0,)) == (1.0, 0.0) and two.ratios((101,)) == (1.0, 1.0)
    assert processed(np.zeros(0, "i8"), 2) == (0.0, 0.0)
    for bad in ((), (1, 2), (NAN,), (float("inf"),)):
        with pytest.raises(HeadwayError, match="thresholds"):
            two.ratios(bad)


def test_inconsistent_score_tables_are_errors() -> None:
    for scores in ([[101.0]], [[-1.0]]):
        with pytest.raises(HeadwayError, match="expected 0 to 100"):
            table(scores)
    with pytest.raises(HeadwayError, match="each once"):
        Scores(("a", "a"), np.zeros((1, 2)), np.ones((1, 2), "i8"), np.ones(1, "i8"))
    with pytest.raises(HeadwayError, match="without tokens"):
        Scores(("a",), np.zeros((1, 1)), np.zeros((1, 1), "i8"), np.ones(1, "i8"))
    with pytest.raises(HeadwayError, match="did you mean 'm1'"):
        table([[1.0, 2.0]]).stages(["m11"])


@pytest.mark.parametrize("row", TABLE_2, ids=lambda row: f"q{row.q_min}-trace{row.trace}")
def test_the_generators_reproduce_table_2(row: Table2Row) -> None:
    scores = generate_scores(row.trace, 20_000, seed=5)
    assert scores.ratios(row.thresholds) == pytest.approx(row.ratios, abs=0.004)
    quality = scores.quality(row.thresholds)
    assert quality is not None and row.q_min <= quality <= row.q_min + 1
    small = [generate_scores(row.trace, 200, seed) for seed in range(30)]
    assert np.abs([s.ratios(row.thresholds)[1] - row.ratios[1] for s in small]).max() < 0.02
    assert np.abs([s.ratios(row.thresholds)[2] - row.ratios[2] for s in small]).max() < 0.06


@pytest.mark.parametrize("trace", TRACES)
def test_every_quality_that_the_paper_asks_for_can_be_reached(trace: int) -> None:
    best = generate_scores(trace, 5000).quality((100, 100))
    assert best is not None and best > 90.5
    llama = generate_scores(trace, 5000, cascade="llama")
    best = max(llama.quality((h,)) or 0 for h in range(101))
    assert best > 80.5
    assert (llama.quality((0,)) or 100) < 75


def test_generated_tables_depend_on_the_seed_alone() -> None:
    one, same, other = generate_scores(1, 50, 7), generate_scores(1, 50, 7), generate_scores(1, 50, 8)
    assert (one.scores == same.scores).all() and (one.output_tokens == same.output_tokens).all()
    assert (one.scores != other.scores).any()
    for cascade, names in CASCADES.items():
        assert generate_scores(2, 3, cascade=cascade).models == names
        assert [model(name).name for name in names] == list(names)
    with pytest.raises(HeadwayError, match="expected 1, 2 or 3"):
        generate_scores(4, 10)


def test_halves_share_no_request() -> None:
    scores = generate_scores(1, 101)
    first, second = scores.split(0.5, seed=1)
    assert len(first) + len(second) == 101 and len(first) == 50
    together = np.concatenate([first.scores, second.scores])
    assert sorted(together[:, 0].tolist()) == sorted(scores.scores[:, 0].tolist())
    with pytest.raises(HeadwayError, match="between 0 and 1"):
        scores.split(1.0, 0)


def test_a_workload_gets_columns_of_a_score_table() -> None:
    scores = generate_scores(1, 40)
    arrivals = Workload({"arrival_s": np.arange(100.0), "prompt_tokens": np.ones(100), "output_tokens": np.ones(100)})
    workload = with_scores(arrivals, scores, seed=3).validate()
    columns = [workload.column(f"quality:{name}") for name in scores.models]
    tokens = [workload.column(f"output_tokens:{name}") for name in scores.models]
    drawn = Scores(scores.models, np.stack(columns, 1), np.stack(tokens, 1).astype("i8"), workload.prompt_tokens)
    counts = np.unique(drawn.scores[:, 2], return_counts=True)[1]
    assert len(counts) == 40 and set(counts.tolist()) <= {2, 3}
    assert drawn.ratios((69, 25)) == pytest.approx(scores.ratios((69, 25)), abs=0.15)
    assert (drawn.output_tokens >= 1).all()
    assert (workload.output_tokens == drawn.output_tokens[:, 0]).all()


def test_read_one_line_per_answer(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv.gz"
    lines = ["request,model,score,output_tokens", "a,big,9,20", "a,small,4,10", "b,small,,7", "b,big,8,", "c,big,7,5"]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    found = read_scores(path, layout=AnswerLayout(best=10, default_tokens=99))
    assert found.models == ("small", "big")
    np.testing.assert_array_equal(found.scores, [[40, 90], [NAN, 80], [NAN, 70]])
    assert found.output_tokens.tolist() == [[10, 20], [7, 99], [99, 5]]
    assert found.notes == ("2 of 6 answers have no score",)
    assert found.ratios((50,)) == (1.0, 1.0) and found.quality((40,)) == pytest.approx((40 + 80 + 70) / 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,m,eleven,1", "line 3: column score: 'eleven'; expected a number"),
        ("a,m,11,1", "expected 0 to 10"),
        ("a,m,3,1", "answers request a twice"),
        ("b,m,3", "fewer cells"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "scores.csv"
    path.write_text(f"request,model,score,output_tokens\na,m,3,1\n{line}\n")
    with pytest.raises(HeadwayError, match=message):
        read_scores(path, layout=AnswerLayout(best=10))


def test_a_wrong_column_or_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("request,model,points\na,m,3\n")
    with pytest.raises(HeadwayError, match="line 1: unknown column 'score'"):
        read_scores(path)
    with pytest.raises(HeadwayError, match="unknown model 'n'; one of: m"):
        read_scores(path, ["n"], AnswerLayout(score="points", output=None))


DATA = Path(os.environ.get("HEADWAY_DATA", "")) / "quality"
needs_data = pytest.mark.skipif("HEADWAY_DATA" not in os.environ, reason="HEADWAY_DATA is unset")


@needs_data
def test_mt_bench_scores_of_two_models() -> None:
    names = ["mistralai/Mixtral-8x7B-Instruct-v0.1", "gpt-4-1106-preview"]
    layout = AnswerLayout(
        request=("question_id", "turn"), score="judge_score_1to10", best=10, no_score=("-1",), output=None
    )
    found = read_scores(DATA / "routellm_mtbench_gpt4judge.csv", names, layout)
    assert len(found) == 160 and np.isnan(found.scores).sum() <= 2
    small, large = found.quality((0,)), found.quality((100,))
    assert small is not None and large is not None
    assert 80 < small < large
    cascade = [found.quality((h,)) or 0.0 for h in range(0, 101, 10)]
    assert max(cascade) >= large, "the better of two answers is no worse than the large model's"


@needs_data
def test_preferences_of_three_models() -> None:
    layout = AnswerLayout(request=("idx",), score="pref", worst=0, best=2, output="output_words", output_scale=4 / 3)
    names = [f"llama-2-{size}-chat-hf" for size in ("7b", "13b", "70b")]
    llama = read_scores(DATA / "alpacaeval1_gpt4_preference_vs_davinci003.csv.gz", names, layout)
    assert len(llama) == 805
    first, both = llama.ratios((75, 75))[1:]
    assert 0 < both < first < 0.5


def test_judge_with_lower_scores_escalates_more_requests() -> None:
    scores = generate_scores(1, 4000, cascade="llama")
    weak = misjudged(scores, GPT_4O_MINI, seed=2)
    assert weak.scores.mean() / scores.scores.mean() == pytest.approx(1 - 0.094, abs=0.02)
    assert weak.ratios((70,))[1] > scores.ratios((70,))[1] + 0.03
    truth = scores.quality_of(weak.final_stage((70,)))
    assert truth is not None and truth > (weak.quality((70,)) or 100)
    assert (misjudged(scores, JudgeNoise()).scores == scores.scores).all()
    assert (misjudged(scores, GPT_4O_MINI, seed=2).scores == weak.scores).all()


class AgreeingJudge(LinearJudge):
    def fit(self, scores: Scores) -> None:
        pass

    def judge(self, scores: Scores) -> Scores:
        return scores


def test_trained_judge_is_evaluated_on_held_out_requests() -> None:
    scores = generate_scores(2, 1000)
    truth, judged = trained(scores, AgreeingJudge(), 0.7, seed=4)
    assert len(truth) == 300 and (truth.scores == judged.scores).all()
    lines = np.log(scores.output_tokens) * 5 + np.log(scores.prompt_tokens)[:, None] * 3
    learnable = Scores(scores.models, np.clip(lines, 0, 100), scores.output_tokens, scores.prompt_tokens)
    truth, judged = trained(learnable, LinearJudge())
    np.testing.assert_allclose(judged.scores, truth.scores, atol=1e-6)
    truth, blind = trained(learnable, LinearJudge(blind=True))
    assert 0.5 < np.abs(blind.scores - truth.scores).mean() < 10
    with pytest.raises(HeadwayError, match="not fitted"):
        LinearJudge().judge(scores)


def test_answers_may_grow_with_difficulty_and_differ_by_model() -> None:
    alike, grown = (generate_scores(1, 4000, lengths=lengths) for lengths in ("alike", "by_difficulty"))
    assert np.array_equal(alike.scores, grown.scores)
    assert grown.output_tokens.mean(axis=0) == pytest.approx([1100, 1300, 1531], rel=0.05)
    hardest, easiest = (np.argsort(grown.scores[:, 0])[part] for part in (slice(400), slice(-400, None)))
    for i in range(3):
        ratio = grown.output_tokens[hardest, i].mean() / grown.output_tokens[easiest, i].mean()
        assert (
            2.5 < ratio < 5
            and 0.8 < alike.output_tokens[hardest, i].mean() / alike.output_tokens[easiest, i].mean() < 1.25
        )
