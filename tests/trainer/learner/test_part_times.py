"""Promises of the times of a step's parts: forward and backward count, nothing else does."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training import NoClock, config, sequences

import trainer.learner.policy_model as policy_model
from trainer.accounting.throughput import PEAK_TFLOPS, peak_tflops, throughput
from trainer.learner import attention
from trainer.learner.learner import Learner
from trainer.learner.part_times import ATTENTION, LOSS_HEAD, PartTimes
from trainer.types import TrainBatch

FORWARD_S, BACKWARD_S, OTHER_S = 0.05, 0.1, 0.3


class Slow(torch.autograd.Function):
    """Takes these seconds in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


def step(times: PartTimes) -> None:
    x = Slow.apply(torch.ones(2, requires_grad=True), 0, OTHER_S) * 2
    with times.part("slow"):
        y = Slow.apply(x, FORWARD_S, BACKWARD_S)
    times.backward_of("slow", x, y)
    Slow.apply(y, 0, OTHER_S).sum().backward()


def test_forward_and_backward_of_a_part_are_measured_and_nothing_beside_it() -> None:
    times = PartTimes(torch.device("cpu"))
    step(times)
    assert times.read() == {}  # outside of `measuring`
    with times.measuring():
        step(times)
        step(times)
    both = times.read()["slow"]
    assert both > 2 * (FORWARD_S + BACKWARD_S) * 0.99
    assert both < 2 * (FORWARD_S + BACKWARD_S) + OTHER_S  # one of the four others would be beyond it
    assert times.read() == {}


class Shares(NoClock):
    """Keeps what was booked."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    def split(self, shares: dict[str, float]) -> None:
        self.shares = shares


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_step_books_the_loss_head_and_attention_as_states(
    model_dir: str, monkeypatch: pytest.MonkeyPatch, checkpointed: bool
) -> None:
    loss, attend, clock = policy_model.policy_loss, attention._attention, Shares()

    def slow_loss(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        out = loss(*args, **kwargs)
        return replace(out, loss=Slow.apply(out.loss, 0, BACKWARD_S))

    def slow_attention(*args: Any) -> Any:
        time.sleep(0.02)
        return Slow.apply(attend(*args), 0, BACKWARD_S)

    monkeypatch.setattr(policy_model, "policy_loss", slow_loss)
    monkeypatch.setattr(attention, "_attention", slow_attention)
    settings = config(checkpoint_activations=checkpointed, micro_batch_tokens=1000)
    one = Learner(settings, model_dir, clock)  # type: ignore[arg-type]
    metrics = one.train(TrainBatch(1, sequences(), {}))
    layers = one.model.lm.config.num_hidden_layers
    calls = metrics["learner/micro_batches"]
    assert metrics["learner/seconds_loss_head"] >= (0.1 + BACKWARD_S) * calls
    assert metrics["learner/seconds_attention"] >= (0.02 * (1 + checkpointed) + BACKWARD_S) * calls * layers
    assert set(clock.shares) == {LOSS_HEAD, ATTENTION, "forward_backward"}
    assert sum(clock.shares.values()) == pytest.approx(1) and min(clock.shares.values()) > 0
    one.score(sequences())
    assert one.times.read() == {}  # scoring has a state of its own


def test_mfu_is_six_flops_a_parameter_and_token_over_the_cards_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    got = throughput(6 * 8_000_000_000, 100_000, 10.0, 2, 989.0)
    assert got["learner/tflop_per_s"] == pytest.approx(240)  # 4.8e15 FLOPs in 10 s on 2 devices
    assert got["learner/mfu"] == pytest.approx(240 / 989)
    assert "learner/mfu" not in throughput(1, 1, 1.0, 1, None) and peak_tflops(torch.device("cpu")) is None
    for name, peak in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_tflops(torch.device("cuda")) == peak and peak in PEAK_TFLOPS.values()
    for unknown in ("Some Card", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=unknown: name)
        assert peak_tflops(torch.device("cuda")) is None
