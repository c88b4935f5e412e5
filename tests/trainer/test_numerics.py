"""Promises of `python -m trainer.doctor --numerics`: hand-worked numbers, advice by the place of the gap."""

import math
from pathlib import Path

import numpy as np
import pytest
from small import MAIN, Begin, run

from trainer.config import Config, ModelConfig
from trainer.doctor import main
from trainer.evaluate.numerics import advice, kl, rows

RNG = np.random.default_rng(0)
LOGPROBS = np.log(RNG.uniform(0.001, 1, 4000)).astype(np.float32)
POSITIONS = RNG.integers(0, 20_000, 4000)


def test_the_divergence_is_that_of_two_distributions_over_all_their_tokens() -> None:
    """p = (1/2, 1/4, 1/4) sampled, q = (1/4, 1/2, 1/4): Σ p log(p / q) = (1/2 − 1/4) log 2."""
    d = np.log([1 / 2, 1 / 2, 2, 1])  # tokens as often as p has them
    assert kl(d) == pytest.approx(0.25 * math.log(2)) and kl(np.zeros(4)) == 0


def test_each_token_is_in_one_row_of_positions_and_in_one_of_probabilities() -> None:
    data = {"gap": LOGPROBS, "logprobs": LOGPROBS, "positions": POSITIONS}
    masks = dict(rows(data))
    for kind, names in (("position", 4), ("probability", 4)):
        chosen = [mask for name, mask in masks.items() if name.startswith(kind)]
        assert len(chosen) == names and (np.sum(chosen, 0) == 1).all()
    assert (LOGPROBS[masks["probability .1 to .5"]] >= math.log(0.1)).all()
    assert (POSITIONS[masks["position 16K+"]] >= 16384).all()


NOISE = RNG.normal(0, 0.1, 4000)
PLACES = {
    "as the engine's temperature were 1.20 times": 0.2 * LOGPROBS + NOISE / 9,
    "grows with the position": NOISE * (1 + POSITIONS / 1000),
    "the same everywhere": NOISE,
    "nothing to change": NOISE / 1000,
}


@pytest.mark.parametrize("said", PLACES)
def test_the_advice_is_that_of_the_place_where_the_gap_is(said: str) -> None:
    data = {"gap": PLACES[said], "logprobs": LOGPROBS, "positions": POSITIONS}
    (line,) = advice(Config(model=ModelConfig(dtype="float32")), data)
    assert said.replace("as the", "as if the") in line


def test_a_head_in_bfloat16_is_named() -> None:
    data = {"gap": NOISE, "logprobs": LOGPROBS, "positions": POSITIONS}
    config = Config(model=ModelConfig(dtype="bfloat16", fp32_head="neither"))
    assert advice(config, data)[0].startswith("model.fp32_head is neither: expected both")


def test_learner_and_engine_of_a_run_are_compared_without_training(tmp_path: Path, begin: Begin) -> None:
    flags = [flag for flag in begin(tmp_path / "run")[len(MAIN) :] if not flag.startswith("--run-dir")]
    out, _ = run([*MAIN, "--numerics", *flags], tmp_path, 0, main)
    assert "expected: mean |d| of at most 0.001 in float32" in out and "nothing to change" in out
    assert not (tmp_path / "run").exists()


def test_flags_without_numerics_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: unknown option --recipe")
