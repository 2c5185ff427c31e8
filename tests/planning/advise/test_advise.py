"""Advice on recorded days: a better router is found, none where today's is the best, and none from a wrong twin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import headway as hw
from headway import catalog
from headway.api.advice import fleet_file
from headway.calibration import calibrate
from headway.catalog.coefficients import CoefficientFile, scaled
from headway.cli import main
from headway.config import strict_yaml
from headway.core.errors import HeadwayError
from headway.metrics.seeds import Estimate
from headway.planning.advise.answer import report
from headway.planning.advise.candidates import NOT_ASKED
from headway.planning.advise.days import Part, parts_of, read, split
from headway.planning.advise.judge import Undecided, estimate, times_needed
from headway.planning.advise.plan import Advice, AdviceOptions, advise
from headway.planning.advise.text import NO_CHANGE, headline, sentences
from headway.planning.advise.trials import Gain, OnParts, Outcome, gain
from headway.planning.rehearsals import Resources, counted
from headway.records import save
from headway.report.render import page
from headway.scenario import Simulator

MIXED = """\
# Served since May.
name: assistant
fleet:
  - {name: fast, model: llama-3.1-8b, gpu: h100-80gb-sxm, engine: vllm-0.15}
  - {name: slow, model: llama-3.1-8b, gpu: l40s, engine: vllm-0.15}  # takes as many with round-robin
slo: {ttft_s: 1, tpot_s: 0.04}
policies:
  routing: round-robin  # as it came
"""
BUSY = {"arrivals": 22, "num_requests": 400, "prompt_tokens": 900, "output_tokens": 60}
FLEET = """\
name: chat
fleet: [{name: chat, model: llama-3.1-8b, gpu: h100-80gb-sxm, engine: vllm-0.15, replicas: 3}]
slo: {ttft_s: 1, tpot_s: 0.05}
policies: {routing: round-robin}
"""
SHORT = {"arrivals": 20, "num_requests": 300, "prompt_tokens": 200, "output_tokens": 30}


def record(folder: Path, text: str, workload: Mapping[str, Any], seed: int, **simulation: Any) -> str:
    """A day of a fleet, as `headway serve --records` leaves it; its path."""
    document, _ = strict_yaml.parse(text, "fleet.yaml")
    ran = hw.simulate({**document, "workload": dict(workload), "seed": seed, "simulation": simulation})
    save(ran.records, folder, {"fleet": text})
    return str(folder)


def fleet_at(folder: Path, text: str = FLEET) -> Path:
    file = folder / "fleet.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("days")
    return [record(folder / f"day{i}", MIXED, BUSY, i) for i in range(2)]


@pytest.fixture(scope="module")
def plan(days: list[str], tmp_path_factory: pytest.TempPathFactory) -> hw.Plan:
    folder = tmp_path_factory.mktemp("planned")
    return hw.advise(fleet_at(folder, MIXED), days, kinds=["routing"], max_rehearsals=90)


# What is proposed.


@pytest.mark.ci
def test_a_better_router_is_found_and_gains_on_days_that_the_choice_never_saw(plan: hw.Plan) -> None:
    answer: Advice = plan.answer
    assert plan.is_met and not answer.is_withheld
    assert {term.key: term.error for term in answer.twin.terms} == pytest.approx(
        dict.fromkeys((each.key for each in answer.twin.terms), 0.0), abs=1e-6
    )
    best = answer.proposals[0]
    assert best.kinds == ("routing",) and best.changes[0].key == ("policies", "routing")
    assert best.worth.low > 0 and best.attainment.low > 0 and best.usd_per_month.mean == 0
    assert best.attainment.low <= best.attainment.mean <= best.attainment.high
    assert not set(answer.tried.chosen_on) & set(answer.tried.judged_on)
    assert {each.split()[0] for each in answer.tried.chosen_on} == {"day1"}
    assert {each.split()[0] for each in answer.tried.judged_on} == {"day0"}
    assert best.worst.attainment == min(each.attainment for each in best.by_day)
    assert len(answer.proposals) <= 10
    assert "round-robin" not in {each.name.removeprefix("routing: ") for each in answer.proposals}


@pytest.mark.ci
@pytest.mark.parametrize(("memory", "compute"), [(1 / 1.08, 1.05), (1.05, 1 / 1.08)])
def test_the_predicted_gain_covers_that_of_the_engines_as_they_are(
    memory: float, compute: float, tmp_path: Path
) -> None:
    """The days are of engines that differ from the model: in memory one way, and in products the other."""
    answer, realised = advised_and_realised(tmp_path, 0, memory, compute)
    assert not answer.is_withheld and answer.step_times is not None
    best = answer.proposals[0]
    assert best.attainment.low <= realised <= best.attainment.high


@pytest.mark.ci
@pytest.mark.parametrize("pool", [0, 1], ids=["fast", "slow"])
@pytest.mark.parametrize(("memory", "compute"), [(1.2, 1.0), (1 / 1.2, 1.0), (1.0, 1.2), (1.0, 1 / 1.2)])
def test_a_model_that_is_off_by_a_fifth_gives_no_advice_or_advice_that_holds(
    pool: int, memory: float, compute: float, tmp_path: Path
) -> None:
    """Half of the time goes by on the slow engine, whose error shows; the fast one keeps its SLOs with any of these."""
    answer, realised = advised_and_realised(tmp_path, pool, memory, compute)
    assert answer.is_withheld == (pool == 1)
    if not answer.is_withheld:
        best = answer.proposals[0]
        assert best.attainment.low <= realised <= best.attainment.high


def advised_and_realised(folder: Path, pool: int, memory: float, compute: float) -> tuple[Advice, float]:
    """Advice by days of engines of which one differs from the model, and what its best proposal gains there."""
    document, _ = strict_yaml.parse(MIXED, "fleet.yaml")
    gpu = str(document["fleet"][pool]["gpu"])
    document["fleet"][pool]["coefficients"] = str(perturbed(folder, memory, compute, gpu))

    def run(seed: int, routing: Any) -> Any:
        return hw.simulate({**document, "workload": dict(BUSY), "seed": seed, "policies": {"routing": routing}})

    days = [run(seed, "round-robin") for seed in range(2)]
    for seed, day in enumerate(days):
        save(day.records, folder / f"day{seed}", {"fleet": MIXED})
    folders = [str(folder / f"day{seed}") for seed in range(2)]
    answer: Advice = hw.advise(fleet_at(folder, MIXED), folders, kinds=["routing"], max_rehearsals=90).answer
    if not answer.proposals:
        return answer, 0.0
    best = answer.proposals[0].changes[0].value
    return answer, run(0, best).summary.slo_attainment - days[0].summary.slo_attainment


def perturbed(folder: Path, memory: float, compute: float, gpu: str = "h100-80gb-sxm") -> Path:
    """A file of the catalog's step times with other efficiencies."""
    used = catalog.coefficients(gpu, "vllm-0.15")
    kernels = scaled(used.kernels, {"memory": memory, "compute": compute, "attention": memory})
    file = folder / f"other-{memory:.3f}.json"
    calibrate.write(file, CoefficientFile((gpu,), kernels, {"vllm-0.15": used.overhead}))
    return file


@pytest.mark.parametrize(
    ("pool", "policy", "workload", "kinds"),
    [
        ("replicas: 3", "round-robin", SHORT, ("routing",)),  # nothing ever waits
        ("replicas: 1", "least-loaded", SHORT, ("ordering", "engine")),  # there is no choice
        ("replicas: 2", "least-loaded", {**BUSY, "arrivals": 80}, ("replicas",)),  # one is too few
    ],
)
def test_nothing_is_proposed_where_todays_setting_is_the_best(
    pool: str, policy: str, workload: Mapping[str, Any], kinds: Sequence[str], tmp_path: Path
) -> None:
    text = FLEET.replace("replicas: 3", pool).replace("round-robin", policy)
    found = [record(tmp_path / f"d{i}", text, workload, i) for i in range(2)]
    answer: Advice = hw.advise(fleet_at(tmp_path, text), found, kinds=kinds).answer
    assert answer.proposals == () and not answer.is_withheld
    assert NO_CHANGE in sentences(answer)[1]


# The twin.


@pytest.mark.parametrize("factor", [1.3, 0.75])
def test_a_twin_that_is_off_withholds_advice_and_names_the_latency(factor: float, tmp_path: Path) -> None:
    slow = record(tmp_path / "slow", FLEET, {**SHORT, "arrivals": 60}, 0, step_time_factor=factor)
    made = hw.advise(fleet_at(tmp_path), [slow], kinds=["routing"])
    answer: Advice = made.answer
    assert answer.is_withheld and not made.is_met and answer.proposals == ()
    off = {term.key: term.error for term in answer.twin.off}
    assert "e2e_s.mean" in off and (off["e2e_s.mean"] > 0) == (factor > 1)
    first, second, _ = sentences(answer)
    assert "E2E mean" in first and f"{100 * off['e2e_s.mean']:+.0f}%" in first and "withheld" in second
    mended_by = answer.mended_by
    assert (
        mended_by == pytest.approx(factor, rel=0.01) and f"`simulation: {{step_time_factor: {mended_by:g}}}`" in second
    )
    mended = fleet_at(tmp_path, f"{FLEET}simulation: {{step_time_factor: {mended_by}}}\n")
    assert not hw.advise(mended, [slow], kinds=["routing"]).answer.is_withheld
    few: Advice = hw.advise(fleet_at(tmp_path), [slow], kinds=["routing"], max_rehearsals=4).answer
    assert few.is_withheld and few.mended_by is None and "headway calibrate" in sentences(few)[1]


def test_days_are_rehearsed_by_the_fleet_that_ran_and_the_step_times_of_todays(tmp_path: Path) -> None:
    ran = FLEET.replace("replicas: 3", "replicas: 4")
    day = record(tmp_path / "day", ran, SHORT, 0)
    answer: Advice = hw.advise(fleet_at(tmp_path), [day], kinds=["admission"]).answer
    assert all(abs(term.error) < 1e-6 for term in answer.twin.terms)


def test_a_day_whose_fleet_is_not_recorded_is_rehearsed_by_todays(days: list[str], tmp_path: Path) -> None:
    (day,) = read([Path(days[0])])
    save(day.records, tmp_path / "bare", {})
    answer: Advice = hw.advise(fleet_at(tmp_path, MIXED), [str(tmp_path / "bare")], kinds=["admission"]).answer
    assert any("today's was taken" in each for each in answer.notes) and not answer.is_withheld


# Money and SLOs.


def test_a_gain_weighs_dollars_against_slos_below_the_target() -> None:
    today = Outcome(10.0, 0.95, 100)
    assert gain(Outcome(8.0, 0.95, 100), today, 0.9) == Gain(pytest.approx(0.2), 2.0, 0.0)
    lost = gain(Outcome(8.0, 0.93, 100), today, 0.95)
    assert lost.worth == pytest.approx(0.2 - 0.02 - 20 * 0.02) and lost.usd_per_hour == 2.0
    assert gain(Outcome(8.0, 0.93, 100), today, 0.93).worth == pytest.approx(0.18)
    assert gain(Outcome(20.0, 0.99, 100), Outcome(10.0, 0.8, 100), 0.99).worth > 0


def test_an_interval_has_the_spread_of_the_days_and_that_of_the_worlds() -> None:
    parts = [Part(f"d{i}", "d", 0.0, None, True, 100) for i in range(3)]
    worlds = [[Gain(each, 0.0, 0.0) for each in gains] for gains in ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], [2.0, 2.0, 2.6])]
    one = estimate(worlds[:1], parts, lambda each: each.worth)
    half = 2.919986 / sqrt(3)  # Student's t of two degrees of freedom at 90%, and a deviation of 1
    assert (one.mean, one.low, one.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-5)
    every = estimate(worlds, parts, lambda each: each.worth)
    assert every.low == pytest.approx(2.0 - sqrt(half**2 + 1.0**2), rel=1e-5)
    assert every.high == pytest.approx(2.0 + sqrt(half**2 + 0.2**2), rel=1e-5)


def test_the_days_for_choosing_say_how_much_days_differ_and_not_how_much_is_gained() -> None:
    parts, others = ([Part(f"{name}{i}", "d", 0.0, None, True, 100) for i in range(3)] for name in "dc")
    gains, chosen = ([Gain(each, 0.0, 0.0) for each in found] for found in ([1.0, 2.0, 3.0], [7.0, 9.0, 11.0]))
    found = estimate([gains], parts, lambda each: each.worth, OnParts(chosen, others))
    half = 2.131847 * sqrt((2 * 1 + 2 * 4) / 4) / sqrt(3)  # Student's t of 2 + 2 degrees of freedom; variances 1 and 4
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), rel=1e-5)
    one = OnParts(chosen[:1], others[:1])
    assert estimate([gains], parts, lambda each: each.worth, one) == estimate([gains], parts, lambda each: each.worth)


def test_an_interval_covers_the_gain_of_the_best_of_many_though_the_days_for_choosing_made_it_the_best() -> None:
    """The best of ten equal changes by three days, judged on four: 90% of the intervals have the gain, which is 0."""
    random = np.random.default_rng(5)
    parts = [Part(f"d{i}", "d", 0.0, None, True, 100) for i in range(4)]
    others = [Part(f"c{i}", "c", 0.0, None, True, 100) for i in range(3)]
    covered = []
    for _ in range(1000):
        chosen, judged = random.normal(size=(10, 3)), random.normal(size=(10, 4))
        best = int(chosen.mean(axis=1).argmax())
        on_chosen, on_judged = ([Gain(float(each), 0.0, 0.0) for each in days[best]] for days in (chosen, judged))
        found = estimate([on_judged], parts, lambda each: each.worth, OnParts(on_chosen, others))
        covered.append(found.low <= 0 <= found.high)
    assert 0.88 < np.mean(covered) < 0.92


@pytest.mark.parametrize(("second", "times"), [(2.0, 5 / 3), (0.5, 3.0), (-0.1, None)])
def test_a_gain_that_is_not_certain_says_how_many_times_as_many_days_would_tell(
    second: float, times: float | None
) -> None:
    """Gains of 0, 2 and 4: Student's t of 4 degrees of freedom is 2.13, and 2.13 * 2 / sqrt(5) the first half below 2.
    Beside a second world 1.5 lower, the half has to be below 1.32, as it is for 9 days; one 2.1 lower tells nothing."""
    parts = [Part(f"d{i}", "d", 0.0, None, True, 100) for i in range(3)]
    worlds = [[Gain(each, 0.0, 0.0) for each in gains] for gains in ([0.0, 2.0, 4.0], [second] * 3)]
    found = times_needed(worlds, parts, lambda each: each.worth)
    assert found == (None if times is None else pytest.approx(times))


NONE, SAVED = Estimate(0.0, 0.0, 0.0), Estimate(500.0, 400.0, 600.0)


@pytest.mark.parametrize(
    ("usd", "attainment", "told"),
    [
        (NONE, Estimate(0.08, 0.01, 0.17), "gains +8.0 points [+1.0, +17.0] of SLO attainment at the same cost"),
        (SAVED, NONE, "saves $500 [$400, $600] a month at the same SLO attainment"),
        (SAVED, Estimate(0.0, -0.0004, 0.0004), "saves $500 [$400, $600] a month at the same SLO attainment"),
        (
            SAVED,
            Estimate(-0.01, -0.02, 0.01),
            "saves $500 [$400, $600] a month and changes SLO attainment by -1.0 points [-2.0, +1.0]",
        ),
        (
            Estimate(-500.0, -600.0, -400.0),
            Estimate(0.08, 0.01, 0.17),
            "gains +8.0 points [+1.0, +17.0] of SLO attainment and costs $500 [$400, $600] more a month",
        ),
        (
            SAVED,
            Estimate(0.0001, -0.001, 0.0),
            "saves $500 [$400, $600] a month and keeps SLO attainment within -0.1 to +0.0 points",
        ),
        (NONE, NONE, "has the same SLO attainment at the same cost"),
    ],
    ids=["gains", "saves", "saves, nearly the same", "saves for attainment", "gains for dollars", "keeps", "nothing"],
)
def test_the_sentence_says_what_a_change_does_for_certain_and_no_gain_of_nothing(
    usd: Estimate, attainment: Estimate, told: str, plan: hw.Plan
) -> None:
    answer: Advice = plan.answer
    best = replace(answer.proposals[0], name="change", usd_per_month=usd, attainment=attainment)
    assert sentences(replace(answer, proposals=(best,)))[1].startswith(f"change {told} (today ")
    assert sentences(replace(answer, compared=best))[1].startswith(f"change {told} (today ")


def test_what_may_gain_is_told_with_what_would_tell(plan: hw.Plan) -> None:
    answer: Advice = plan.answer
    few = Estimate(0.08, -0.01, 0.17)
    undecided = Undecided("routing: lmetric", Estimate(1.6, -0.2, 3.4), Estimate(0.0, 0.0, 0.0), few, 1.25)
    shown = replace(answer, proposals=(), tried=replace(answer.tried, undecided=(undecided,)))
    assert sentences(shown)[1].endswith(
        "; routing: lmetric may gain +8.0 points [-1.0, +17.0] of SLO attainment and $0 a month:"
        " about 1.2 times as many requests would tell."
    )
    never = replace(shown, tried=replace(shown.tried, undecided=(replace(undecided, times=None),)))
    assert sentences(never)[1].endswith(": 20 times as many requests would not tell.")


# Days and parts.


def test_a_part_begins_before_its_requests_count(days: list[str]) -> None:
    (day,) = read([Path(days[0])])
    first, second = parts_of(day, 20_000, 2, 2)
    made = second.document({"simulation": {"step": "exact"}, "workload": {"sampling": "greedy"}})
    assert first.lead_s == 0 and 0 < second.lead_s <= second.from_s
    assert made["simulation"] == {"step": "exact", "warmup_s": second.lead_s}
    assert made["workload"]["sampling"] == "greedy"
    assert made["workload"]["trace"]["from_s"] == second.from_s - second.lead_s
    assert first.tail_s > 0 and second.tail_s == 0
    trace = first.document({})["workload"]["trace"]
    assert trace["to_s"] == first.to_s + first.tail_s
    assert not second.suits_scaling and parts_of(day, 20_000, 1, 1)[0].suits_scaling


def test_a_rehearsed_part_counts_the_requests_of_that_part_alone(days: list[str], tmp_path: Path) -> None:
    """Requests before and after it are rehearsed, and do not count."""
    (day,) = read([Path(days[0])])
    file = fleet_file(fleet_at(tmp_path, MIXED), {})
    for part in parts_of(day, 20_000, 3, 3):
        records = Simulator().records(file.assemble(part.document(file.document)))
        chosen = counted(records, part.lead_s, None, part.until_s)
        assert len(chosen) == part.num_requests
        assert len(records.workload["arrival_s"]) > part.num_requests


def test_parts_have_equally_many_requests_and_none_is_in_two(days: list[str]) -> None:
    (day,) = read([Path(days[0])])
    parts = parts_of(day, 20_000, 4, 16)
    assert [part.num_requests for part in parts] == [100] * 4
    assert [part.to_s for part in parts[:-1]] == [part.from_s for part in parts[1:]]
    assert sum(part.num_requests for part in parts_of(day, 100, 1, 3)) == 300
    one = split([day], 20_000)
    assert "one day is given" in one.notes[0] and not set(one.chosen_on) & set(one.judged_on)


def test_too_few_requests_are_an_error(tmp_path: Path) -> None:
    few = record(tmp_path / "few", FLEET, {**SHORT, "num_requests": 90}, 0)
    with pytest.raises(HeadwayError, match="one day of 90 requests; expected 300, or more days"):
        hw.advise(fleet_at(tmp_path), [few])
    with pytest.raises(HeadwayError, match="a day is given twice"):
        hw.advise(fleet_at(tmp_path), [few, few])


def test_iterations_that_take_longer_make_answers_longer_by_as_much() -> None:
    alone = {"arrivals": 0.1, "num_requests": 5, "prompt_tokens": 500, "output_tokens": 50}
    document, _ = strict_yaml.parse(FLEET, "fleet.yaml")
    one, slow = (
        hw.simulate({**document, "workload": alone, "simulation": {"step_time_factor": factor}}).summary.tpot_s
        for factor in (1.0, 1.5)
    )
    assert one is not None and slow is not None and slow.mean == pytest.approx(1.5 * one.mean, rel=1e-3)


@pytest.mark.ci
def test_what_the_page_shows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet file and the commands of docs/advise.md, in this process."""
    script = (Path(__file__).parents[3] / "docs" / "advise.md").read_text().split("```bash\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    text, commands = script.removeprefix("cat > fleet.yaml <<'END'\n").split("\nEND\n")
    Path("fleet.yaml").write_text(text + "\n")
    variable, *lines = commands.strip().splitlines()
    name, _, value = variable.partition("=")
    for line in lines:
        program, *words = line.replace(f"${name}", value.strip('"')).split()
        few = ["--max-rehearsals", "90"] if words[0] == "advise" else []
        assert program == "headway" and main([*words, *few]) == 0
    before, after = text.splitlines(), Path("changed.yaml").read_text().splitlines()
    assert [old for old, new in zip(before, after, strict=True) if old != new] == [
        "  routing: round-robin  # as it came"
    ]


# What is written.


def test_an_answer_is_the_same_after_json_and_from_the_cache(plan: hw.Plan, days: list[str]) -> None:
    answer: Advice = plan.answer
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Advice) == answer


def test_the_diff_makes_the_proposed_fleet(plan: hw.Plan, tmp_path: Path) -> None:
    from tests.config.test_yaml_edit import patched

    for each in plan.answer.proposals:
        text = patched(MIXED, each.diff)
        document, _ = strict_yaml.parse(MIXED, "fleet.yaml")
        assert strict_yaml.parse(text, "")[0] == {**document, "policies": {"routing": each.changes[0].value}}
        assert "# Served since May." in text and "# as it came" in text
    plan.save(tmp_path / "changed.yaml")
    made = strict_yaml.read(tmp_path / "changed.yaml")[0]
    assert made["policies"]["routing"] == plan.answer.proposals[0].changes[0].value
    shown = page(report(plan.answer), "headway advise")
    assert all(each.name in shown for each in plan.answer.proposals) and headline(plan.answer) in shown


def test_few_rehearsals_say_what_was_cut_and_a_second_answer_comes_from_the_cache(
    days: list[str], tmp_path: Path
) -> None:
    file, options = fleet_file(fleet_at(tmp_path, MIXED), {}), AdviceOptions(kinds=("routing",), max_rehearsals=40)
    folders, resources = [Path(each) for each in days[:2]], Resources(Simulator(), tmp_path)
    first, again = (advise(file, folders, options, resources) for _ in range(2))
    assert first.tried.num_rehearsals <= 40 and any("--max-rehearsals" in each for each in first.notes)
    assert again.tried.num_simulated == 0 and again.proposals == first.proposals
    with pytest.raises(HeadwayError, match="--max-rehearsals: too few"):
        advise(file, folders, replace(options, max_rehearsals=4), resources)


def test_what_cannot_be_tried_is_named_with_what_would_allow_it(tmp_path: Path) -> None:
    text = FLEET.replace("replicas: 3", "endpoints: [http://127.0.0.1:1, http://127.0.0.1:2]")
    day = record(tmp_path / "day", text, {**SHORT}, 0)
    answer: Advice = hw.advise(fleet_at(tmp_path, text), [day], kinds=["replicas", "scaling"]).answer
    reasons = {each.name: (each.reason, each.needs) for each in answer.left_out}
    assert reasons["3 replicas of chat"] == (
        "there are no more endpoints",
        "the address of another engine in fleet[0]",
    )
    assert reasons["all of kind scaling"][0] == "the fleet does not scale"
    (others,) = [each for each in answer.left_out if each.kind == NOT_ASKED]
    assert "routing, ordering" in others.name and "scaling" not in others.name.split(", ")
    few = [each for each in answer.left_out if each is not others]
    assert sentences(answer)[2].endswith(f"; {len(few)} could not be tried.")
    assert all(each.needs for each in answer.left_out if each.kind in ("GPU type", "speculative", "disaggregation"))


def test_the_command_prints_sentences_a_table_and_diffs(
    days: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = fleet_at(tmp_path, MIXED)
    line = [str(fleet), "--records", *days[:2], "--kinds", "admission", "--jobs", "1", "--cache", str(tmp_path / "c")]
    assert main(["advise", *line, "--html", str(tmp_path / "a.html")]) == 0
    shown = capsys.readouterr().out
    assert "800 requests of day0, day1" in shown
    assert NO_CHANGE in shown and "not tried" in shown
    assert (tmp_path / "a.html").read_text().count("Headway") > 1
    assert main(["advise", *line, "--json"]) == 0
    answer = msgspec.convert(json.loads(capsys.readouterr().out), Advice, strict=False)
    assert answer.days == ("day0", "day1")
    assert main(["advise", str(fleet)]) == 2 and "--records is missing" in capsys.readouterr().err
    assert main(["advise", *line, "--kinds", "ruoting"]) == 2 and "'routing'" in capsys.readouterr().err


# One candidate.


@pytest.mark.ci
def test_a_candidate_is_compared_with_todays_fleet_whether_it_gains_or_not(
    days: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(text: str) -> dict[str, Any]:
        other = tmp_path / "candidate.yaml"
        other.write_text(text)
        fleet = str(fleet_at(tmp_path, MIXED))
        options = ("--candidate", str(other), "--max-rehearsals", "90", "--jobs", "1", "--no-cache", "--json")
        assert main(["advise", fleet, "--records", days[0], *options]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert answer["proposals"] == [] and len(answer["tried"]["judged_on"]) == 4
        return answer["compared"]["attainment"]  # type: ignore[no-any-return]

    same = compared(MIXED)
    assert same == {"mean": 0, "low": 0, "high": 0}
    better = compared(MIXED.replace("round-robin", "headway"))
    assert better["low"] > 0.1
