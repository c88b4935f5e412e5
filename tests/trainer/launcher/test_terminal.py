"""What a person sees: at any width, with anything missing, whatever the model wrote."""

import re
from io import StringIO
from typing import Any

import pytest
from fakes import having
from rich.cells import cell_len
from rich.console import Console

from trainer.config import Config
from trainer.launcher.terminal import LiveView, RunState, View, describe_forecast, make_view
from trainer.launcher.terminal_plot import clock, curve, printable

CONFIG = having(Config(run_dir="runs/demo-0"), pipeline={"steps": 60}, evaluation={"every": 10})
HOSTILE = "[red]boom[/red] [/] \x1b[2J\x1b]0;owned\x07 \r日本語\u202e\x9b31m\nlast"
SAMPLE = {
    "step": 3,
    "prompt": "Calculate.\n3 + 4 =",
    "answer": "7",
    "completions": [{"text": HOSTILE * 20, "reward": 1.0, "outcome": "correct", "tokens": 9}],
}
STEP = {"step": 3, "train/reward": -0.25, "train/pass_rate": 0.375, "lag/mean": 0.5, "lag/max": 1}
STEP |= {"engine/tokens_per_s": 512.0, "idle/engine": 0.12, "learner/tokens_per_s": 830.0}
STEP |= {"idle/learner": 0.31, "compute/total": 0.0123, "learner/entropy": 0.678}
EVALUATION = {"step": 10, "eval/pass_rate": 0.41, "eval/pass_rate_se": 0.02, "compute/total": 0.01}
CEILING = {"forecast/ceiling": 0.88, "forecast/ceiling_low": 0.82, "forecast/ceiling_high": 0.93}
CEILING |= {"forecast/end": 0.74}
FED: list[list[dict[str, Any]]] = [
    [],
    [{}],
    [{"step": 1}],
    [{"step": 1, "train/reward": None, "lag/max": float("nan"), "idle/engine": "?"}],
    [{"eval/pass_rate": None}],
    [{"eval/pass_rate": float("nan")}, {"step": 2}],
    [{"step": 0, "eval/pass_rate": 0.0}, STEP, EVALUATION | {"eval/pass_rate": 1.0}],
    [{"step": 0, "eval/pass_rate": 0.2}, STEP, STEP | {"step": 4}, STEP, EVALUATION | CEILING],
    [EVALUATION | {"forecast/ceiling": 0.88}, STEP],
    [EVALUATION | {f"eval/{'long-name/' * 9}{i}/pass_rate": 0.5 for i in range(30)}, STEP],
]


def live(width: int, height: int = 24) -> LiveView:
    console = Console(file=StringIO(), force_terminal=True, width=width, height=height, color_system="256")
    return LiveView(CONFIG, "core-hours", console.file, console)


def frame(view: LiveView) -> str:
    """The text of the current frame."""
    with view.console.capture() as printed:
        view.console.print(view.render())
    return re.sub(r"\x1b\[[\d;]*m", "", printed.get()).rstrip("\n")


@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize(("width", "height"), [(20, 8), (60, 24), (80, 24), (140, 45)])
def test_a_frame_fits_whatever_is_missing(width: int, height: int, fed: list[dict[str, Any]]) -> None:
    view = live(width, height)
    view.phase("loading")
    view.log(HOSTILE)
    view.sample(SAMPLE)
    for metrics in fed:
        view.update(metrics)
    lines = frame(view).split("\n")
    assert all(cell_len(line) <= width for line in lines)
    if height >= 24:
        assert len(lines) < height


def test_model_text_is_shown_as_written_and_steers_nothing() -> None:
    view = live(80)
    with view:
        view.update(STEP)
        view.sample(SAMPLE)
        view.log(HOSTILE)
    out = view.console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]boom[/red]" in out  # not taken for markup
    assert "\x1b[2J" not in out and "\x1b]0;" not in out and "\x9b" not in out and "\u202e" not in out


@pytest.mark.parametrize(
    "sample", [{}, {"completions": []}, {"completions": [{"reward": 1.0}]}, {"prompt": "x"}]
)
def test_a_sample_without_completions_or_texts_is_no_error(sample: dict[str, Any]) -> None:
    view = live(80)
    view.update(STEP)
    view.sample(sample)
    assert "sample" in frame(view)


def test_the_live_view_shows_what_matters() -> None:
    view = live(100)
    for metrics in ({"step": 0, "eval/pass_rate": 0.18}, STEP, EVALUATION):
        view.update(metrics)
    assert "ceiling not yet identified" in frame(view)
    view.update(EVALUATION | CEILING)
    shown = frame(view)
    for text in ("step 3/60", "0.180 → 0.410 ± 0.020", "-0.250", "0.50 (max 1)", "512 tok/s (idle 12%)"):
        assert text in shown
    for text in ("0.678", "830 tok/s (idle 31%)", "0.0123 core-hours", "ceiling 0.88 [0.82, 0.93], end 0.74"):
        assert text in shown
    alarm = {"forecast/predicted": 0.6, "forecast/predicted_low": 0.55, "forecast/predicted_high": 0.65}
    view.update(EVALUATION | alarm | {"forecast/alarm": 1.0})
    assert describe_forecast(view.state) == (
        "ceiling not yet identified, predicted 0.60 [0.55, 0.65]: outside the 90 % interval"
    )
    rate = {"forecast/rate": 0.71, "forecast/rate_low": 0.5, "forecast/rate_high": 1.0, "forecast/end": 0.74}
    view.update(EVALUATION | rate)
    assert describe_forecast(view.state) == (
        "ceiling not yet identified, end 0.74, at 0.71 [0.50, 1.00] times the mean FLOPs per device-hour"
    )
    sets = {"eval/math/pass_rate": 0.25, "eval/math/pass_rate_se": 0.01, "eval/math/aime/pass_rate": 0.125}
    tall = live(100, 32)
    for metrics in (STEP, EVALUATION | sets):
        tall.update(metrics)
    assert re.search(r"math +0.250 ± 0.010", frame(tall)) and re.search(r"math/aime +0.125", frame(tall))
    view.update(EVALUATION)  # a fit that no longer identifies the ceiling takes the forecast back
    assert "ceiling not yet identified" in frame(view)


def test_an_episode_is_shown_with_its_turns_seconds_and_failures() -> None:
    turns = [{"content": "4\n", "tokens": 2}, {"content": HOSTILE}, {"content": "6\n", "tokens": 2}]
    view, out = live(100, 40), StringIO()
    episodes = {"environment/turns": 2.5, "environment/seconds": 0.0123, "environment/error": 0.25}
    view.update(STEP | episodes)
    view.sample({"completions": [{"reward": 1.0, "turns": turns}]})
    assert re.search(r"turns +2.5 an episode", frame(view))
    assert re.search(r"environment +0.012 s, 25% failed", frame(view))
    assert "4 ⏎ [red]boom[/red]" in frame(view) and "last6 ⏎" in frame(view)
    make_view(CONFIG, "core-hours", stream=out).update(STEP | episodes)
    make_view(CONFIG, "core-hours", stream=out).update(STEP)
    lines = out.getvalue().splitlines()
    assert ", turns 2.5 an episode, environment 0.012 s, 25% failed, lag 0.50" in lines[0]
    assert "episode" not in lines[1] and "environment" not in lines[1]


@pytest.mark.parametrize("fed", FED)
def test_the_plain_log_has_no_escape_codes(fed: list[dict[str, Any]]) -> None:
    out = StringIO()
    with make_view(CONFIG, "core-hours", stream=out) as view:
        assert type(view) is View
        view.phase("loading")
        view.log(HOSTILE)
        view.sample(SAMPLE)
        for metrics in fed:
            view.update(metrics)
        view.finish("done")
    lines = out.getvalue().splitlines()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out.getvalue())
    assert lines[-1] == "done" and "[red]boom[/red]" in out.getvalue()


def test_the_plain_log_paces_its_step_lines_and_shows_every_evaluation() -> None:
    out = StringIO()
    view = make_view(CONFIG, "core-hours", stream=out)
    for step in range(1, 61):
        view.update(STEP | {"step": step})
        if step % 10 == 0:
            view.update(EVALUATION | {"step": step})
    assert out.getvalue().count("held-out pass rate 0.410 ± 0.020") == 6
    assert re.findall(r"step (\d+)/60", out.getvalue()) == ["1", "60"]


def test_time_left_counts_the_evaluations_to_come() -> None:
    state = RunState(steps=20)
    state.update({"step": 0, "eval/pass_rate": 0.1, "eval/seconds": 9.0}, 0.0)
    assert state.remaining(0.0) is None
    for step, now in enumerate((102.0, 104.0, 106.0, 108.0, 118.0, 120.0, 122.0), 1):  # step 5 waited for one
        state.update({"step": step}, now)
    # 13 steps at 20 s / 6, the last evaluation alone: 9 s; less 3 s since.
    assert state.remaining(125.0) == pytest.approx(13 * 20 / 6 + 9 - 3)


def test_time_left_is_not_known_from_before_a_resume() -> None:
    view = live(80)
    for step in range(1, 11):
        view.update(STEP | {"step": step}, resumed=True)
    assert view.state.step == 10 and view.state.remaining(0.0) is None
    for step, now in ((11, 100.0), (12, 103.0), (13, 106.0)):
        view.state.update({"step": step}, now)
    assert view.state.remaining(106.0) == pytest.approx(47 * 3)


def test_a_terminal_that_was_closed_does_not_end_the_run() -> None:
    class Closed(StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with make_view(CONFIG, "core-hours", stream=Closed()) as view:
        view.update(STEP)
        view.finish("done")


def test_the_curve_puts_points_where_they_belong() -> None:
    lines = [line.plain for line in curve([(0.0, 0.0), (1.0, 1.0)], None, 12, 5)]
    assert lines[0].startswith("1.00│") and lines[2].startswith("0.50│") and lines[4].startswith("0.00│")
    assert lines[0][-1] == "●" and lines[4][5] == "●"
    dashed = [line.plain for line in curve([(0.0, 0.0), (1.0, 0.5)], 1.0, 12, 5)]
    assert dashed[0] == "1.00│" + "╌" * 12


def test_small_helpers() -> None:
    assert [clock(s) for s in (None, 0.4, 187, 3753)] == ["–", "0:00", "3:07", "1:02:33"]
    assert printable("a\nb\x1b\tc") == "a ⏎ b· c"
