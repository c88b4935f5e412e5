"""accuracy.py and bench.gpu: every stage runs dry on a CPU, its JSON is whole after every case."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as gpu
from bench.gpu import first, kernels
from bench.gpu import trainer as trainer_stage
from bench.kernels import accuracy
from bench.kernels.problem import LossAnswer, log_probs, make_problem
from bench.kernels.providers import Provider
from bench.learner import step as learner_step
from bench.learner import throughput
from bench.records import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="dry runs are for machines without a GPU")


def test_accuracy_runs_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    accuracy.main(["--quick", "--device=cpu", "--backends=torch", f"--out={out}"])
    records = json.loads(out.read_text())["records"]
    assert not [r for r in records if r.get("error")] and len(records) >= 15
    assert all(r["met"] is None for r in records)  # bars hold at full sizes only
    text = capsys.readouterr().out
    for r in records:
        assert f"{r['value']:.2e}" in text and r["check"] in text


def test_a_backend_that_fails_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "accuracy.json"
    accuracy.main(["--quick", "--device=cpu", "--backends=nonsense,torch", "--checks=chunks", f"--out={out}"])
    records = json.loads(out.read_text())["records"]
    assert "nonsense" in records[0]["error"] and records[1]["value"] < 2e-3
    assert "error: ValueError" in capsys.readouterr().out


def test_the_gemms_error_is_the_accumulators() -> None:
    p = make_problem(16, 64, 300, torch.bfloat16)
    truth = accuracy.logits64(p.hidden.detach(), p.weight.detach())
    torch.testing.assert_close(truth, p.hidden.detach().double() @ p.weight.detach().double().t())
    found = accuracy.mm_error(p, truth)
    assert 0 < found["logits_max_abs"] < 1e-4 and 0 < found["logp_max_abs"] < 1e-4
    shifted = accuracy.mm_error(p, truth + torch.eye(16, 300, dtype=torch.float64))
    assert shifted["logits_max_abs"] == pytest.approx(1, abs=1e-4)


def test_log_probs_keep_their_digits_near_zero_and_far_below() -> None:
    z = torch.tensor([[0.0, 40.0, 1.0], [900.0, 0.0, 0.0]], dtype=torch.float64)
    near, far = log_probs(z, torch.tensor([1, 2]))
    # log(1 + e^-40 + e^-39) to its own digits; log1p of a sum of 1e-17 is that sum
    assert float(near) == pytest.approx(-(2.718281828459045**-40 + 2.718281828459045**-39), rel=1e-12)
    assert float(far) == pytest.approx(-900, rel=1e-12)


def test_before_rounding_finds_the_error_under_it() -> None:
    g = torch.Generator().manual_seed(0)
    true = torch.randn(300, 200, dtype=torch.float64, generator=g)
    wrong = true * (1 + 3e-3 * torch.randn(true.shape, dtype=torch.float64, generator=g))
    rounded = accuracy.relative(wrong.bfloat16(), true)
    assert rounded > 3.3e-3
    assert accuracy.before_rounding(rounded, true) == pytest.approx(3e-3, rel=0.02)


@pytest.fixture(autouse=True)
def ours_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is slow, and tested elsewhere."""
    monkeypatch.setattr(kernels, "backend", lambda: "torch")


def suite(out: Path, stage: str) -> tuple[int, dict[str, Any]]:
    status = gpu.main(["--out", str(out), stage, "--dry-run", "--here"])
    found: dict[str, Any] = json.loads((out / f"{stage}.json").read_text())
    return status, found


@pytest.mark.slow
def test_stage_kernels_runs_dry_with_every_case_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unpeered = [list(phase) for phase in kernels.plan(8, (4, 8))]
    unpeered[1] = [(Provider("peer that is missing", _missing), None)]
    monkeypatch.setattr(kernels, "plan", lambda chunk, sweep: unpeered)
    status, record = suite(tmp_path, "kernels")
    assert status == 0 and record["dry_run"] and record["accuracy"][0]["value"] < 1e-4
    names = [case["name"] for case in record["cases"]]
    shapes = {tuple(case["shape"]) for case in record["cases"]}
    assert len(shapes) == len(kernels.DRY_SHAPES)
    for name in ("3 bare GEMMs", "ours, two-pass", "1 bare GEMM", "ours, scoring", "ours, two-pass, chunk 4"):
        assert names.count(name) == len(shapes)
    text = (tmp_path / "kernels.txt").read_text()
    assert text.strip() in capsys.readouterr().out
    for case in record["cases"]:
        if case["name"] == "peer that is missing":
            assert case["error"].startswith("ModuleNotFoundError")
        elif "error" not in case:
            assert f"{case['ms']['median']:.2f}" in text
            n, h, v = case["shape"]
            gemms = 2 if "1 bare" in case["name"] or "scoring" in case["name"] else 6
            rate = gemms * n * h * v / case["ms"]["median"] / 1e9
            assert case["effective_tflops"] == pytest.approx(rate)
    ours = next(case for case in record["cases"] if case["name"] == "ours, two-pass")
    assert ours["errors"]["d_weight_rel"] < 3e-3 and ours["of_limit"] > 0


def _missing(p: Any) -> LossAnswer:
    raise ModuleNotFoundError("No module named 'peer'")


def test_the_json_is_there_after_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is killed in its third case leaves two behind."""

    def killed(p: Any) -> LossAnswer:
        raise KeyboardInterrupt

    phases = [list(phase) for phase in kernels.plan(8, (4,))]
    phases[0][2] = (Provider("killed", killed), None)
    monkeypatch.setattr(kernels, "plan", lambda chunk, sweep: phases)
    with pytest.raises(KeyboardInterrupt):
        suite(tmp_path, "kernels")
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert [c["name"] for c in record["cases"]] == ["3 bare GEMMs", "3 bare GEMMs, chunked"]


def test_rows_are_halved_until_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(p: Any) -> LossAnswer:
        if len(p.targets) > 300:
            raise torch.OutOfMemoryError("too much")
        return LossAnswer()

    p = make_problem(1024, 4, 5, torch.bfloat16)
    found = kernels.fitting((Provider("hungry", hungry), None), p, 1)
    assert found["rows"] == 256


def test_stage_trainer_runs_dry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are bench.learner's, tested there; one that fails is a line."""
    stood: list[bool] = []

    def measure(what: str, p: Any, folder: str, *rest: Any) -> dict[str, Any]:
        stood.append((Path(folder) / "config.json").exists())
        if what == "gemm":
            return {"flops_per_s": 1e9, "product": "some product"}
        return {"error": "killed"} if what == "plain" else {"seconds": [0.5], "peak_bytes": 10**9}

    monkeypatch.setattr(throughput, "measure", measure)
    status, record = suite(tmp_path, "trainer")
    assert status == 0 and all(stood) and len(stood) == 4
    ours, plain = record["cases"]
    assert plain["error"] == "killed" and ours["providers"]["ours"]["s"]["median"] == 0.5
    text = (tmp_path / "trainer.txt").read_text()
    assert f"{ours['flops']['matmul'] / 1e9 / 0.5:.3f}" in text and "killed" in text
    assert text.strip() in capsys.readouterr().out


def test_stage_trainer_holds_its_shapes_to_their_bars() -> None:
    plan = trainer_stage.plan(dry=False)
    assert [(name, provider) for name, _, provider in plan[:2]] == [
        ("qwen3-0.6b, packs", "ours"), ("qwen3-4b, packs", "ours"),
    ]  # fmt: skip
    for name, p, _ in plan:
        counted = learner_step.lengths(learner_step.make_batch(p), p)
        if "one" in name:
            assert counted["completions"] == 1 and 16_000 < counted["fed_ours"] <= 16_384
        else:
            assert counted["longest"] <= 4_224 and counted["fed_ours"] / counted["micro_batches"] > 12_000
    case = {
        "name": "qwen3-4b, one of 16K", "card": "NVIDIA H200",
        "flops": {"matmul": 989e11, "attention": 989e11},
        "providers": {"ours": {"s": {"median": 0.5}}}, "gemm": {"flops_per_s": 0.0},
    }  # fmt: skip
    assert trainer_stage.bars([case]) == ["qwen3-4b, one of 16K: MFU with attention: 0.4, bar ≥ 0.3: met"]
    assert "0.2, bar ≥ 0.4: NOT MET" in trainer_stage.bars([case | {"name": "qwen3-4b, packs"}])[0]


def test_failures_of_the_tests_are_in_the_json(tmp_path: Path) -> None:
    report = tmp_path / "r.xml"
    report.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="b"><failure message="assert 1 == 2"/></testcase>'
        '<testcase classname="a" name="c"/></testsuite></testsuites>'
    )
    assert kernels.junit(report) == {
        "tests": 3, "failures": 1, "errors": 0, "skipped": 1,
        "failed": [{"test": "a::b", "message": "assert 1 == 2"}],
    }  # fmt: skip


def test_without_a_gpu_every_stage_is_skipped_in_one_line(tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 0
    lines = (tmp_path / "summary.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.FIRST) and len(lines) == 12
    assert all("skipped: no GPU" in line for line in lines)


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="stage nonsense: expected some of machine, flash"):
        gpu.main(["--out", str(tmp_path), "nonsense"])


def test_every_path_that_a_stage_tests_exists() -> None:
    paths = [
        path for stage in gpu.FIRST.values() for args in getattr(stage.call, "args", ()) for path in args
    ]
    files = [path for path in paths if re.fullmatch(r"[\w/]+\.py", path)]
    assert len(files) == 6 and all((ROOT / path).is_file() for path in files)


@pytest.mark.slow
def test_a_failing_stage_stops_no_other_and_is_in_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpu.FirstStage(0.01, first.ipc_stage)
    monkeypatch.setitem(gpu.FIRST, "ipc", slow)
    assert gpu.main(["--out", str(tmp_path), "machine", "ipc", "engine", "--dry-run"]) == 1
    ends = [re.split(r"\s{2,}", line)[:2] for line in capsys.readouterr().out.splitlines()]
    assert ends == [["machine", "passed"], ["ipc", "failed: over its 0.01 s"], ["engine", "passed"]]
    record = json.loads((tmp_path / "engine.json").read_text())
    assert record["same_tokens"] and (tmp_path / "engine.log").read_text()
    assert json.loads((tmp_path / "machine.json").read_text())["versions"]["torch"] == torch.__version__


def test_a_stage_that_fails_leaves_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu.FIRST, "ipc", gpu.FirstStage(1, lambda: [][0]))
    assert gpu.main(["--out", str(tmp_path), "ipc", "--here"]) == 1
    assert json.loads((tmp_path / "ipc.json").read_text())["error"].startswith("IndexError")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["learner-0.6b", "syncs", "nccl", "ipc", "launcher"])
def test_the_stages_run_on_a_cpu(stage: str, tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path), stage, "--here"]) == 0
    record = json.loads((tmp_path / f"{stage}.json").read_text())
    if stage == "launcher":
        assert record["unit"] == "core-hours" and record["steps"][-1] >= 2 * first.LAUNCHED_STEPS
    if stage == "learner-0.6b":
        assert record["kernels"] > 100 and record["seconds"] > 0 and record["estimated_gib"] > 0


@pytest.mark.slow
def test_the_command_runs_the_suites_in_processes_of_their_own(tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path), "trainer", "tests", "--dry-run"]) == 0
    assert "useful tok/s" in (tmp_path / "trainer.log").read_text()
    record = json.loads((tmp_path / "tests.json").read_text())
    assert record["pytest"]["exit"] == 0 and record["pytest"]["tests"] > 0 and record["accuracy"]
    assert "passed" in (tmp_path / "tests.log").read_text()


def test_the_bars_are_read_off_the_record() -> None:
    def case(name: str, rate: float, **more: Any) -> dict[str, Any]:
        ms = {"median": 1000 / rate, "low": 1.0, "high": 2.0}
        return {"shape": [4, 5, 6], "name": name, "ms": ms, "effective_tflops": rate} | more

    record = {
        "dry_run": False, "commit": None, "machine": {"card": "X"}, "versions": {"torch": "2", "triton": "3"},
        "chunk_rows": 4, "error_rows": 2,
        "cases": [
            case("3 bare GEMMs", 780), case("ours, two-pass", 600, of_limit=0.77),
            case("ours, spx, chunk 2", 715, of_limit=0.917), case("ours, scoring", 600, of_limit=0.8),
            case("Liger CISPO", 65), case("TRL chunked log-prob", 600),
        ],
    }  # fmt: skip
    text = "\n".join(kernels.bars(record))
    assert "fastest of ours at (4, 5, 6): ours, spx, chunk 2" in text
    assert "share of the bare GEMMs' rate: 0.917, bar ≥ 0.9: met" in text
    assert "TF/s: 715, bar ≥ 700: met" in text and "times Liger's CISPO: 11, bar ≥ 8: met" in text
    assert "times the best 8NHV peer: 1.19, bar ≥ 1.25: NOT MET" in text
    assert "scoring, share of one bare GEMM's rate: 0.8, bar ≥ 0.85: NOT MET" in text
    assert text in kernels.describe(record)
