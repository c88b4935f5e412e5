"""Promises of dtype, FP32 head and learning rate: numbers worked by hand, or float64's."""

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import having
from safetensors.torch import load_file
from training import config, error, generate, learner, oracle, sequence, sequences

from trainer.config import Config, EngineConfig, LearnerConfig
from trainer.engines.torch import process
from trainer.engines.torch.engine import TorchEngine
from trainer.learner.learner import Learner
from trainer.learner.optimizer import FIRST_SCALE, LossScale, lr_share
from trainer.learner.packing import pack
from trainer.learner.policy_model import hidden_states
from trainer.learner.weight_file import WeightFiles
from trainer.mismatch import PARITY_NATS
from trainer.types import Request, TrainBatch


def of(dtype: Any, fp32_head: Any = "both", **learner: Any) -> Config:
    return having(config(**learner), model={"dtype": dtype, "fp32_head": fp32_head})


@pytest.mark.axis("model.dtype", "float32", "bfloat16", "float16")
@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("float32", 0, 1e-5), ("float16", 1e-5, 1e-2), ("bfloat16", 1e-3, 0.1)]
)
def test_the_gradient_is_as_exact_as_its_type(model_dir: str, dtype: str, least: float, most: float) -> None:
    one, exact = learner(model_dir, of(dtype)), oracle(model_dir, sequences(), 2.0)[1]
    metrics = one.train(TrainBatch(1, sequences(), {}))
    # What AdamW was given, by its first moment: its step would hide a factor that is left in.
    used = {n: one.optimizer.state[w]["exp_avg"] / 0.1 for n, w in one.weights.items()}
    assert least <= error(used, exact) < most and {p.dtype for p in one.parameters} == {torch.float32}
    norm = np.sqrt(sum(float((g**2).sum()) for g in exact.values()))
    assert metrics["learner/grad_norm"] == pytest.approx(norm, rel=most)
    assert metrics.get("learner/loss_scale") == (FIRST_SCALE if dtype == "float16" else None)


def test_small_float16_gradients_survive_by_the_loss_scale(model_dir: str) -> None:
    tiny = tuple(replace(s, token_weights=s.token_weights * np.float32(1e-7)) for s in sequences())
    exact = oracle(model_dir, tiny, 2.0)[1]
    errors = []
    for scale in (FIRST_SCALE, 1.0):
        one = learner(model_dir, of("float16"))
        one.policy.scale.state[0] = scale
        one.policy.step = lambda norm, lr: None  # type: ignore[method-assign]
        one.train(TrainBatch(1, tiny, {}))
        errors.append(error({n: w.grad / scale for n, w in one.weights.items()}, exact))  # type: ignore[operator]
    assert errors[0] < 1e-2 < 0.3 < errors[1]


def test_an_overflow_halves_the_scale_and_the_same_data_are_used(model_dir: str) -> None:
    one, other = (learner(model_dir, of("float16")) for _ in range(2))
    one.policy.scale.state[0] = 2.0**40
    metrics = one.train(TrainBatch(1, sequences(), {}))
    other.train(TrainBatch(1, sequences(), {}))
    assert metrics["learner/overflows"] > 5 and one.version == 1
    assert metrics["learner/loss_scale"] == 2.0 ** (40 - metrics["learner/overflows"])
    for a, b in zip(one.parameters, other.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
    one.parameters[0].register_hook(lambda g: g * np.nan)  # no scale helps: the step is skipped
    scale, before = one.policy.scale.value, [p.detach().clone() for p in one.parameters]
    metrics = one.train(TrainBatch(2, sequences(), {}))
    assert metrics["learner/skipped_steps"] == 1 and "gradient norm is nan" in metrics["learner/skipped_why"]
    assert one.version == 2 and one.policy.scale.value == scale
    assert all(map(torch.equal, one.parameters, before))


def test_the_scale_doubles_after_a_hundred_steps() -> None:
    scale = LossScale("float16")
    for _ in range(99):
        scale.record_step()
    assert scale.value == 2.0**16
    scale.record_step()
    assert scale.value == 2.0**17


def test_float16_weights_are_published_as_f16_and_loaded_by_engines(model_dir: str, tmp_path: Path) -> None:
    one = learner(model_dir, of("float16"))
    one.train(TrainBatch(1, sequences(), {}))
    files = WeightFiles(str(tmp_path), 1 << 20, 1, torch.float16)
    path = Path(files.write(one.weights, 1))
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float16}
    engine = TorchEngine(model_dir, torch.float16, fp32_head=True, slots=4)
    engine.update_weights(1, str(path))
    gap = parity(engine, one)
    files.close()
    assert gap.mean() < PARITY_NATS["float16"] / 10


def parity(engine: TorchEngine, one: Learner) -> np.ndarray:
    """|log π_learner − log π_engine| of generated tokens, in nats."""
    completions = generate(engine, Request("r", (3, 4, 5), 4, 12, 1.0, frozenset(), 0))
    scores = one.score([sequence((3, 4, 5), c.token_ids) for c in completions])
    pairs = zip(scores, completions, strict=True)
    return np.concatenate([np.abs(x.logprobs - c.logprobs_gen) for x, c in pairs])


@pytest.mark.axis("model.fp32_head", "both", "learner", "generator", "neither")
@pytest.mark.parametrize("fp32_head", ["both", "learner", "generator", "neither"])
def test_logits_are_fp32_exactly_where_the_head_is(
    model_dir: str, tmp_path: Path, fp32_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = replace(of("bfloat16", fp32_head), engine=EngineConfig(slots=4), run_dir=str(tmp_path))
    one = learner(model_dir, c)
    (m,) = pack(sequences(), 4096)
    body, inputs = one.model.lm.base_model, one.model.inputs(m, (), {})
    with torch.no_grad():
        hidden = hidden_states(body, inputs, torch.bfloat16).bfloat16()
    weight = one.model.lm.get_output_embeddings().weight.detach().bfloat16()
    assert_logprobs(
        one.model(m, None, 1.0).logprobs, hidden, weight, torch.from_numpy(m.targets),
        rounded=fp32_head not in ("both", "learner"),
    )  # fmt: skip

    made: list[TorchEngine] = []
    monkeypatch.setattr(process, "serve", lambda engine, *args: made.append(engine))
    conn, telemetry = multiprocessing.Pipe()[0], multiprocessing.Pipe()[0]
    conn.send = telemetry.send = lambda message: None  # type: ignore[method-assign]
    process.engine_main(c, model_dir, conn, 1, "engine", telemetry)
    (engine,) = made
    engine.submit(Request("r", (3,), 4, 1, 1.0, frozenset(), 0))
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(engine, "_forward", lambda *args, f=engine._forward: seen.append(f(*args)) or seen[0])
    completions = sorted(engine.step(), key=lambda completion: completion.index)
    targets = torch.tensor([c.token_ids[0] for c in completions], dtype=torch.long)
    logprobs = torch.tensor([c.logprobs_gen[0] for c in completions])
    assert_logprobs(logprobs, seen[0], weight, targets, rounded=fp32_head not in ("both", "generator"))


def assert_logprobs(
    got: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rounded: bool
) -> None:
    """log-softmax of hidden · weightᵀ: of FP64 logits, or of logits rounded to bfloat16."""
    exact = hidden.double() @ weight.double().T
    either = [z.log_softmax(-1).gather(1, targets[:, None])[:, 0] for z in (exact, exact.bfloat16().double())]
    torch.testing.assert_close(got.double(), either[rounded], rtol=0, atol=1e-5)
    assert not torch.allclose(got.double(), either[not rounded], rtol=0, atol=1e-4)


@pytest.mark.axis("learner.schedule", "constant", "cosine", "linear")
@pytest.mark.parametrize(
    ("schedule", "final", "warmup", "expected"),
    [
        # Six steps. After the warm-up's two, a share of 1/5, 2/5, 3/5 and 4/5 of the course is done;
        # the cosine's half wave there is .904508, .654508, .345492, .095492.
        ("constant", 0.1, 2, [0.5, 1, 1, 1, 1, 1]),
        ("cosine", 0.1, 2, [0.5, 1, 0.914058, 0.689058, 0.410942, 0.185942]),
        ("linear", 0.1, 2, [0.5, 1, 0.82, 0.64, 0.46, 0.28]),
        # Without a warm-up the first step has the whole rate; sixths of the course.
        ("linear", 0.0, 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", 0.0, 0, [1, 0.933013, 0.75, 0.5, 0.25, 0.066987]),
        ("cosine", 0.0, 9, [1 / 9, 2 / 9, 3 / 9, 4 / 9, 5 / 9, 6 / 9]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    schedule: Any, final: float, warmup: int, expected: list[float]
) -> None:
    settings = LearnerConfig(schedule=schedule, final_lr_share=final, warmup_steps=warmup)
    shares = [lr_share(settings, step, 6) for step in range(1, 7)]
    np.testing.assert_allclose(shares, expected, atol=1e-6)


def test_the_schedule_ends_where_the_batch_expects_the_run_to_end(model_dir: str) -> None:
    """Linear without a warm-up: of n steps the second has 1 − 1/n, or 1/2 if it is the last or beyond."""
    for expected, share in ((0.0, 1 - 1 / 60), (4.5, 1 - 1 / 4.5), (2.0, 0.5), (1.2, 0.5)):
        one = learner(model_dir, config(schedule="linear", lr=1e-3))
        one.version = 1
        metrics = one.train(TrainBatch(2, sequences(), {}, steps=expected))
        assert metrics["learner/lr"] == pytest.approx(1e-3 * share)
