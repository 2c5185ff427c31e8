"""The sweep over a model's operators: what it plans, how it times, what becomes of its file. With fakes for the GPU."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway import catalog
from headway.calibration.calibrate import calibrate
from headway.calibration.fit import fit_all
from headway.calibration.measure import plan, sweep
from headway.calibration.measure.plan import OperatorCase
from headway.calibration.measure.sweep import TimedKernel, TimedOperator, time_s
from headway.calibration.measurements import read as read_measurements
from headway.calibration.operators import COLUMNS, FIRST_COLUMNS, read
from headway.cli import main
from headway.core.errors import HeadwayError
from headway.core.fleet import Parallel
from headway.perf.attention import attention_costs
from kernel_clock import ON, Clock

LLAMA = catalog.model("llama-3.1-8b")
H100 = catalog.gpu("h100")


def test_the_plan_covers_every_kind_of_operator() -> None:
    operations, notes = plan.sweep(LLAMA, ON)
    kinds = {(each.kind, each.dtype) for each in operations}
    assert kinds == {
        ("gemm", "bf16"),
        ("gemm", "fp8"),
        ("prefill_attention", ""),
        ("decode_attention", ""),
        ("device_copy", ""),
        ("host_copy", ""),
        ("all_reduce", ""),
        ("top_p_sort", ""),
        ("top_p", ""),
        ("penalties", ""),
    }
    assert len(set(operations)) == len(operations)
    assert {(4096, 14336), (28672, 4096), (6144, 4096)} <= {
        each.shape[1:] for each in operations if each.kind == "gemm"
    }
    assert {each.shape[0] for each in operations if each.kind == "all_reduce"} == {2}
    assert max(map(plan.num_bytes, operations)) <= plan.MEMORY_SHARE * H100.memory_bytes
    assert plan.seconds(operations, ON) < 300
    assert not notes


def test_the_first_eighth_of_a_plan_has_all_kinds() -> None:
    operations, _ = plan.sweep(LLAMA, ON)
    assert {each.kind for each in operations[: len(operations) // 8]} == {each.kind for each in operations}


def test_plan_notes_skipped_operators() -> None:
    _, notes = plan.sweep(catalog.model("deepseek-v3"), replace(catalog.gpu("a10"), gpus_per_node=1))
    text = "; ".join(notes)
    assert "experts are timed in bf16 alone" in text and "shapes are too large" in text
    assert "one GPU: no all-reduce" in text
    assert "fp8" not in {each.dtype for each in plan.sweep(LLAMA, replace(catalog.gpu("a100"), gpus_per_node=1))[0]}


def test_on_the_cpu_large_shapes_are_left_out() -> None:
    operations, notes = plan.sweep(LLAMA, plan.CPU)
    assert "shapes are too large for this device" in notes[0]
    assert max(plan.least_s(each, plan.CPU) for each in operations) <= plan.LONGEST_S / plan.ROUNDS


@pytest.mark.parametrize("seconds", [1e-7, 3e-5, 0.004, 0.5])
@pytest.mark.parametrize("calls", [1, 16])
def test_timing_leaves_out_the_first_runs(seconds: float, calls: int) -> None:
    clock = Clock()
    assert time_s(clock.kernel(seconds, calls, cold_s=9.0), clock) == pytest.approx(seconds)
    assert clock.num_runs <= 3 + 5 * 2000


def test_timing_takes_the_median_round() -> None:
    clock = Clock()
    noise = iter([0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 7.0, 0.0])

    def wait() -> None:
        clock.now_s += 0.02 + next(noise)

    assert time_s(TimedKernel(lambda: None, wait), clock) == pytest.approx(0.02)


def test_calibration_reads_the_file_of_a_sweep(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "m.csv"
    operations, _ = plan.sweep(LLAMA, ON)
    done = sweep.run(operations, clock.device(), clock, path, H100.name, "fakes")
    assert (done.num_timed, done.num_known, done.num_left, done.failures) == (len(operations), 0, 0, {})
    reading = read(path, H100)
    assert not reading.left_out and reading.num_rows == len(operations)
    fits, notes = fit_all(reading.samples, H100)
    found = {fit.key: fit.values for fit in fits}
    assert found["gemm.bf16"]["memory_efficiency"] == pytest.approx(0.7, rel=0.02)
    assert found["gemm.fp8"]["compute_efficiency"] == pytest.approx(0.7, rel=0.02)
    assert found["gemm.fp8"]["cast_efficiency"] == pytest.approx(0.5, rel=0.1)
    assert found["host_copy"] == {"latency_s": pytest.approx(5e-6, rel=0.1), "efficiency": pytest.approx(0.7, rel=0.01)}
    assert {"decode_attention", "prefill_attention", "device_copy", "all_reduce.2"} <= set(found)
    assert not notes


def test_stopped_sweep_continues(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "m.csv"
    operations, _ = plan.sweep(LLAMA, ON)
    first = sweep.run(operations, clock.device(), clock, path, H100.name, "fakes", limit_s=5.0)
    assert first.num_timed > 0 and first.num_left > 0
    before = sweep.read_file(path, H100.name)
    second = sweep.run(operations, clock.device(), clock, path, H100.name, "fakes")
    assert second.num_known == first.num_timed == len(before)
    assert first.num_timed + second.num_timed == len(operations)
    rows = sweep.read_file(path, H100.name)
    assert rows[: len(before)] == before
    assert {row.operation for row in rows} == set(operations)
    runs = clock.num_runs
    third = sweep.run(operations, clock.device(), clock, path, H100.name, "fakes")
    assert (third.num_timed, third.num_known, clock.num_runs) == (0, len(operations), runs)


def test_kernels_that_cannot_run_are_counted(tmp_path: Path) -> None:
    clock = Clock()
    operations, _ = plan.sweep(LLAMA, ON)
    device = clock.device(lambda each: "no such instruction" if each.dtype == "fp8" else None)
    done = sweep.run(operations, device, clock, tmp_path / "m.csv", H100.name, "fakes")
    num = sum(each.dtype == "fp8" for each in operations)
    assert done.failures == {"gemm fp8: no such instruction": num}
    assert done.num_timed == len(operations) - num


def test_interrupted_sweep_keeps_its_measurements(tmp_path: Path) -> None:
    clock, path, made = Clock(), tmp_path / "m.csv", [0]
    operations, _ = plan.sweep(LLAMA, ON)

    def kernels(operation: OperatorCase) -> TimedKernel:
        made[0] += 1
        if made[0] > 20:
            raise KeyboardInterrupt
        return clock.device()(operation)

    with pytest.raises(KeyboardInterrupt):
        sweep.run(operations, kernels, clock, path, H100.name, "fakes")
    assert len(sweep.read_file(path, H100.name)) == 20


def test_progress_ends_at_one(tmp_path: Path) -> None:
    clock, shares = Clock(), list[float]()
    operations, _ = plan.sweep(LLAMA, ON)
    sweep.run(operations[:40], clock.device(), clock, tmp_path / "m.csv", "h", "f", progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "not a file of headway measure; give another --out"),
        (",".join(COLUMNS) + "\nconv" + "," * (len(COLUMNS) - 1) + "\n", "unknown operator 'conv'"),
        (",".join(COLUMNS) + "\ngemm,bf16,1,x" + "," * (len(COLUMNS) - 4) + "\n", "m.csv:2: not as headway measure"),
    ],
)
def test_foreign_files_are_not_overwritten(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(HeadwayError, match=message):
        sweep.run([], Clock().device(), Clock(), path, H100.name, "fakes")
    assert path.read_text() == text


def test_a_file_of_another_gpu_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    sweep.write_file(path, [TimedOperator(OperatorCase("device_copy", "", (1024.0,)), 1e-5, "l4", "fakes")])
    with pytest.raises(HeadwayError, match="has measurements of l4; expected h100-80gb-sxm"):
        sweep.read_file(path, H100.name)


def test_a_dry_run_needs_no_torch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main("measure --model llama-3.1-8b --gpu h100 --dry-run".split()) == 0
    out = capsys.readouterr().out
    assert "llama-3.1-8b on h100-80gb-sxm" in out and "minutes" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--model llama-3.1-8b", r"pip install 'headway[measure]'; --dry-run does without"),
        ("--model llama-3.1-8b --dry-run", "--dry-run does not detect a GPU: give --gpu, or --device cpu"),
        ("--gpu h100 --dry-run", "--model, --model-config: expected one of them"),
        ("--model llama-3.1-8b --gpu h1000 --dry-run", "unknown GPU 'h1000'; did you mean"),
        ("--model llama-3.1-8b --minutes 0", "--minutes"),
    ],
)
def test_mistakes_are_one_line(
    args: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["measure", *args.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error


def test_memory_is_freed_after_each_shape(tmp_path: Path) -> None:
    """Also after one that fails in its timing, and only when nothing refers to its operands any more."""
    clock, freed = Clock(), list[int]()
    operations, _ = plan.sweep(LLAMA, ON)

    def kernels(operation: OperatorCase) -> TimedKernel:
        operand = set[int]()
        alive = weakref.ref(operand)

        def run() -> None:
            operand.add(1)
            if operation is operations[3]:
                raise sweep.KernelError("out of memory")

        def wait() -> None:
            clock.now_s += 0.01

        return TimedKernel(run, wait, release=lambda: freed.append(alive() is None))

    done = sweep.run(operations[:6], kernels, clock, tmp_path / "m.csv", H100.name, "fakes")
    assert (done.num_timed, sum(done.failures.values())) == (5, 1)
    assert len(freed) == 6 and all(freed[:3] + freed[4:])


def _measured(factor: float, software: str) -> list[TimedOperator]:
    """Samples of a device that reaches `factor` of the peaks, with all-reduces."""
    operations, _ = plan.sweep(LLAMA, ON)
    return [
        TimedOperator(each, 5e-6 + plan.least_s(each, ON) / factor, H100.name, software)
        for each in operations
        if each.kind in ("gemm", "all_reduce") and each.dtype != "fp8"
    ]


def test_pytorch_replaces_an_engines_kernels_only_when_asked(tmp_path: Path) -> None:
    """On a GPU of which the catalog has an engine's kernels: old and new are printed, and the old ones stay."""
    path = tmp_path / "m.csv"
    sweep.write_file(path, _measured(0.6, "torch 2.9.0, CUDA 12.9"))
    measured, known = read_measurements((path,), H100), catalog.coefficients(H100.name, "vllm-0.15").kernels
    kept = calibrate(measured, H100, catalog.engine("vllm-0.15"), "a test")
    assert (kept.file.kernels.gemm, kept.file.kernels.all_reduce) == (known.gemm, known.all_reduce)
    notes = "\n".join(kept.notes)
    assert "gemm.bf16: memory_efficiency 0.884 -> 0.6" in notes
    assert "kept: the catalog's, an engine's; --replace gemm.bf16 takes it" in notes
    asked = calibrate(measured, H100, catalog.engine("vllm-0.15"), "a test", replaced=["gemm.bf16"])
    assert asked.file.kernels.gemm["bf16"].memory_efficiency == pytest.approx(0.6, rel=0.01)
    assert asked.file.kernels.all_reduce == known.all_reduce
    with pytest.raises(HeadwayError, match="--replace gem: no such fit; expected one of: all, all_reduce"):
        calibrate(measured, H100, catalog.engine("vllm-0.15"), "a test", replaced=["gem"])


def test_an_engines_own_kernels_replace_the_catalogs_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    sweep.write_file(path, _measured(0.6, "vllm 0.24.0"))
    found = calibrate(read_measurements((path,), H100), H100, catalog.engine("vllm-0.15"), "a test")
    known = catalog.coefficients(H100.name, "vllm-0.15").kernels
    assert found.file.kernels.all_reduce["2"] != known.all_reduce["2"]
    notes = "\n".join(found.notes)
    assert "gemm.bf16: memory_efficiency 0.884 -> 0.6" in notes and "replaces what the catalog has measured" in notes


def test_experts_latent_attention_and_sampler_are_fitted(tmp_path: Path) -> None:
    """From the file of a sweep to the step times that use them, on a GPU that reaches 70% of its peaks."""
    clock, path = Clock(), tmp_path / "m.csv"
    deepseek = catalog.model("deepseek-v3")
    operations = [
        each for each in plan.sweep(deepseek, H100)[0] if each.kind in ("moe", "mla_attention", *plan.SAMPLER)
    ]
    sweep.run(operations, clock.device(), clock, path, H100.name, "vllm 0.24.0")
    measured = read_measurements((path,), H100)
    assert not any(file.left_out for file in measured.files)
    known = catalog.coefficients(H100.name, "vllm-0.15")
    file = calibrate(measured, H100, catalog.engine("vllm-0.15"), "a test").file
    assert file.kernels.moe["bf16"].memory_efficiency == pytest.approx(0.7, rel=0.05)
    latent = file.kernels.mla_attention
    assert latent is not None and latent.memory_efficiency == pytest.approx(0.7, rel=0.05)
    engine, used = catalog.engine("vllm-0.15"), Parallel(tp=8)
    cost = attention_costs(deepseek, H100, engine, used, file.kernels).decode_s
    read_s = deepseek.num_layers * 1152 / H100.bandwidth_bytes_per_s  # memory bounds the shared heads of 8 GPUs
    assert cost == pytest.approx(read_s / 0.7, rel=0.02)
    assert attention_costs(LLAMA, H100, engine, used, file.kernels) == attention_costs(
        LLAMA, H100, engine, used, known.kernels
    )
    assert file.kernels.decode_attention == known.kernels.decode_attention
    overhead = file.engines["vllm-0.15"]
    assert overhead.sort_bytes_per_logit == pytest.approx(plan.LOGIT_BYTES / 0.7, rel=0.01)
    assert overhead.cut_bytes_per_logit == overhead.penalty_bytes_per_logit == overhead.sort_bytes_per_logit
    assert overhead.sampler_latency_s == pytest.approx(5e-6, rel=0.05)


def test_files_of_earlier_versions_are_continued(tmp_path: Path) -> None:
    """Their columns are those of the operators that they could have."""
    path, clock = tmp_path / "m.csv", Clock()
    operations = [OperatorCase("device_copy", "", (2.0**i,)) for i in range(16, 30)]
    sweep.run(operations[:7], clock.device(), clock, path, H100.name, "fakes")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(",".join(line.split(",")[: len(FIRST_COLUMNS)]) for line in lines) + "\n")
    assert read(path, H100).samples[0].seconds.size == 7
    assert sweep.run(operations, clock.device(), clock, path, H100.name, "fakes").num_known == 7
    assert path.read_text().startswith(",".join(COLUMNS))


def test_calibration_takes_a_sort_as_slow_as_a_gpu_sorts_and_no_other_unit(tmp_path: Path) -> None:
    """On an H100 the median sort takes 64 times what one pass over the logits takes."""
    operations = [each for each in plan.sweep(LLAMA, H100)[0] if each.kind in plan.SAMPLER]

    def rows(unit: float) -> list[TimedOperator]:
        found = []
        for each in operations:
            pass_s = 5e-6 + 8 * each.shape[0] * each.shape[1] / H100.bandwidth_bytes_per_s
            slow = {"top_p_sort": 64, "top_p": 6, "penalties": 20}[each.kind]
            found.append(TimedOperator(each, unit * slow * pass_s, H100.name, "torch 2.11"))
        return found

    sweep.write_file(tmp_path / "m.csv", rows(1.0))
    measured = read_measurements((tmp_path / "m.csv",), H100)
    assert not any(file.left_out for file in measured.files)
    assert calibrate(measured, H100, catalog.engine("vllm-0.15"), "a test", replaced=["all"]).fits
    sweep.write_file(tmp_path / "ms.csv", rows(1000.0))
    with pytest.raises(HeadwayError, match="is the unit right"):
        read_measurements((tmp_path / "ms.csv",), H100)


def test_what_computes_is_timed_at_the_clock_that_lasts(tmp_path: Path) -> None:
    """A long product warms up for a quarter of a second, what memory bounds does not."""
    long, short = OperatorCase("gemm", "bf16", (8192, 4096, 4096)), OperatorCase("gemm", "bf16", (8, 4096, 4096))
    assert plan.warm_up_s(long, H100) == plan.SUSTAINED_S and plan.warm_up_s(short, H100) == 0
    for case, least_s in ((long, plan.SUSTAINED_S), (short, 0.0)):
        clock = Clock()
        path = tmp_path / f"{case.shape[0]:.0f}.csv"
        sweep.run(
            [case],
            lambda _, c=clock: c.kernel(1e-3),
            clock,
            path,
            H100.name,
            "fakes",
            warm_up_s=lambda each: plan.warm_up_s(each, H100),
        )
        assert clock.now_s == pytest.approx(least_s + 5 * 0.02, rel=0.05)
