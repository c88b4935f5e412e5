"""The promise of the mismatch by position: the mean of each range, however the tokens are packed."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from fakes import having
from training import NoClock, config, make_model, sequences

from trainer.config import ConfigError
from trainer.controller import parity
from trainer.launcher.recorder import _sentence
from trainer.learner.learner import Learner
from trainer.messages import Event
from trainer.mismatch import PARITY_NATS, RANGES, means_by_position, sums_by_position
from trainer.types import TokenScores, TrainBatch, TrainSequence


def test_means_are_those_of_each_range_and_sums_add_up() -> None:
    positions = np.array([0, 1023, 1024, 4095, 4096, 16384, 40000])
    gaps = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 8.0, 10.0])
    sums = sums_by_position(gaps[:3], positions[:3]) + sums_by_position(gaps[3:], positions[3:])
    assert means_by_position(sums) == {"0-1K": 1.5, "1-4K": 4.0, "4-16K": 7.0, "16K+": 9.0}
    assert means_by_position(sums_by_position(gaps[:1], positions[:1])) == {"0-1K": 1.0}


@pytest.mark.parametrize("tokens", [4096, 40])
def test_a_step_reports_it_by_the_positions_in_the_sequences(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.mismatch.EDGES", (4, 8, 12))
    one = Learner(config(micro_batch_tokens=tokens), make_model("tied", tmp_path), NoClock())  # type: ignore[arg-type]  # as much of a clock as it needs
    batch = sequences()
    scores, by_range = one.score(batch), dict[str, list[float]]()
    for s, x in zip(batch, scores, strict=True):
        assert x.logprobs is not None
        for i in np.flatnonzero(s.token_weights).tolist():
            name = RANGES[sum(len(s.prompt_ids) + i >= edge for edge in (4, 8, 12))]
            by_range.setdefault(name, []).append(abs(float(x.logprobs[i] - s.logprobs_gen[i])))
    metrics = one.train(TrainBatch(1, batch, {}))
    expected = {name: math.fsum(gaps) / len(gaps) for name, gaps in by_range.items()}
    assert len(expected) == 4 and metrics["mismatch/by_position"] == pytest.approx(expected, rel=1e-4)


def test_the_parity_gate_reports_it_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.mismatch.EDGES", (6, 8, 12))
    one, zero = np.ones(4, np.float32), np.zeros(4, np.int32)
    s = TrainSequence(np.zeros(4, np.int32), zero, -one, zero, np.array([1, 1, 1, 0], np.float32), one)
    learner, weights = AsyncMock(), MagicMock()  # the latter's turns are asynchronous contexts
    learner.score.return_value = (TokenScores(np.array([-1.01, -1.02, -1.03, 9], np.float32)),)
    monkeypatch.setattr(parity, "rollout_prompt", AsyncMock(return_value=[]))
    monkeypatch.setattr(parity, "scorable", lambda prompt, rollouts: [s])
    monkeypatch.setitem(PARITY_NATS, "float32", 0.05)
    prompts: Any = ["one prompt"]
    report = asyncio.run(parity.parity_gate(MagicMock(config=config()), learner, weights, prompts))
    assert report["tokens"] == 3
    assert report["by_position"] == pytest.approx({"0-1K": 0.015, "1-4K": 0.03}, rel=1e-4)
    line = _sentence(Event("parity", 0.0, report))
    assert line.endswith("3 tokens to 2.0e-02 nats (max 3.0e-02); by position 0-1K 1.5e-02, 1-4K 3.0e-02")


def test_experts_that_engines_do_not_return_are_said_or_refused_where_demanded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the engine: the second of two servers by URL, say. One episode had no token."""
    none, zero = np.zeros(0, np.int32), np.zeros(4, np.int32)
    one, some = np.ones(4, np.float32), np.zeros((7, 2), np.uint8)
    s = TrainSequence(zero, zero, -one, zero, one, one, experts=some)
    failed = TrainSequence(zero, none, none, none, none, none)
    batch, said = [s, replace(s, experts=None), failed], list[str]()
    learner, weights = AsyncMock(), MagicMock()
    prompts: Any = ["one prompt"]
    learner.score.return_value = (TokenScores(-one), TokenScores(-one), TokenScores(np.zeros(0, np.float32)))
    monkeypatch.setattr(parity, "rollout_prompt", AsyncMock(return_value=[]))
    monkeypatch.setattr(parity, "scorable", lambda prompt, rollouts: batch)

    def gate(setting: bool | None = None, replayed: bool = True) -> None:
        ctx: Any = MagicMock(config=having(config(), model={"replay_experts": setting}))
        lacking = said.append if replayed else None
        asyncio.run(parity.parity_gate(ctx, learner, weights, prompts, lacking))

    gate()
    (text,) = said
    assert text.startswith("experts are not replayed: 1 of 2 completions came without them. vLLM on a CPU")
    with pytest.raises(ConfigError, match="replay_experts is true, and of the experts 1 of 2 completions"):
        gate(True)
    gate(replayed=False)
    batch[1] = s
    gate(True)
    assert len(said) == 1
