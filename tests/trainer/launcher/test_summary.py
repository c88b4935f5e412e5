"""What is printed at the end of a run."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.accounting.ledger import Ledger
from trainer.config import Config
from trainer.launcher.summary import finish, graded, summary_text
from trainer.messages import Spans
from trainer.scaling import EvalPoint, curve_of, fit_curve


@dataclass
class Point:
    step: int
    pass_rate: float
    pass_rate_se: float


def test_the_summary_shows_start_and_end_where_the_compute_went_and_what_is_where(tmp_path: Path) -> None:
    ledger = Ledger({"engine": 1.0, "learner": 1.0}, "core-hours", 0.0, None)
    ledger.add(Spans("engine", (("start-up", 0, 360), ("generate", 360, 3600))))
    learner = (("start-up", 0, 360), ("idle", 360, 2160), ("forward_backward", 2160, 3600))
    ledger.add(Spans("learner", learner))
    ledger.begin_training(360.0)
    (tmp_path / "curve.png").touch()
    points: Any = [Point(0, 0.182, 0.019), Point(60, 0.861, 0.017)]
    text = summary_text(tmp_path, points, ledger, "A = 0.93 [0.88, 0.97]", "nothing to split", (2.5, 3.25))
    assert "0.182 ± 0.019 (step 0) → 0.861 ± 0.017 (step 60)" in text
    assert "1.8 core-hours, and 0 for evaluation, 0.2 for start-up" in text
    assert "held-out reward" not in text
    rows = [(0.182, 0.25), (0.861, 0.75)]  # pass rate and mean reward of a scorer with grades
    lines = [f'{{"step": 1, "eval/pass_rate": {p}, "eval/mean_reward": {r}}}\n' for p, r in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    again = summary_text(tmp_path, points, ledger, "", "", (2.5, 3.25))
    assert "held-out reward     0.250 → 0.750" in again
    assert re.search(r"generate +0\.9000 +90\.0% +–\n", text)
    assert re.search(r"idle +– +0\.5000 +50\.0%\n", text)
    assert "A = 0.93 [0.88, 0.97]" in text and "curve.png" in text and "report.html" not in text
    assert "learner's memory    2.5 GB at most on a rank, 3.25 GB estimated" in text
    assert "memory" not in summary_text(tmp_path, [], ledger, "no curve", "nothing to split", (0.0, 3.25))


def test_a_run_whose_reward_has_fallen_is_not_told_to_go_on(tmp_path: Path) -> None:
    rates = [0.1, 0.2, 0.4, 0.6, 0.7, 0.7, 0.5, 0.3, 0.2, 0.15]
    points = [EvalPoint(10 * i, i / 10, rate, 0.01) for i, rate in enumerate(rates)]
    ledger = Ledger({"learner": 1.0}, "core-hours", 0.0, None)
    ledger.add(Spans("learner", (("idle", 0, 3600),)))
    for some, fallen in ((points, True), (points[:6], False)):
        fit = fit_curve(curve_of("run", "core-hours", some))
        text = finish(Config(run_dir=str(tmp_path)), some, fit, ledger, (0.0, 0.0))
        assert ("since step 40: more steps are no help" in text) == fallen != ("--resume" in text)


def test_of_rewards_that_follow_from_the_pass_rate_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/pass_rate": 0.25, "eval/mean_reward": -0.5}\n')
    assert graded(tmp_path) == []
