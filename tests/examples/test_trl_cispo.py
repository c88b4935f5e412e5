"""The promises of examples/trl_cispo.py: TRL's CISPO loss to 1e-4, anchored on the generator, learning."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is missing: pip install --no-deps -r requirements/examples.txt")

from transformers import PrinterCallback

from examples.trl_cispo import FusedCISPOTrainer, check, make_trainer

ACCUMULATION, PER_GENERATION = 2, 4  # micro-batches of a step and of a generation: both are in the normaliser
SMALL = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": ACCUMULATION,
    "steps_per_generation": PER_GENERATION,
    "temperature": 0.8,
    "epsilon_high": 2.0,
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> FusedCISPOTrainer:
    return make_trainer(str(tmp_path_factory.mktemp("trl")), **SMALL)


@pytest.fixture(scope="module")
def batch(trainer: FusedCISPOTrainer) -> dict[str, Any]:
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def noise(batch: dict[str, Any], seed: int) -> Tensor:
    return torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(seed))


def through_the_logits(trainer: FusedCISPOTrainer, batch: dict[str, Any], anchor: Tensor) -> list[Tensor]:
    """Loss and gradients of the formula, in float64, by autograd through all logits; NaN anchors count 0."""
    model = copy.deepcopy(trainer.model).double()
    model.forward = type(model).forward.__get__(model)  # without TRL's patch
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=attention).logits / SMALL["temperature"]
    log_pi = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    log_pi = log_pi[:, -batch["completion_ids"].shape[1] :]
    kept = batch["completion_mask"].bool() & ~anchor.isnan()
    advantages = batch["advantages"][:, None].expand_as(kept)
    log_pi, anchor, advantages = (x[kept] for x in (log_pi, anchor, advantages))
    coefficient = (log_pi.detach() - anchor).exp().clamp(max=SMALL["epsilon_high"])
    assert 0.1 < float((coefficient == SMALL["epsilon_high"]).double().mean()) < 0.9
    window = batch["num_items_in_batch"].item() * ACCUMULATION / PER_GENERATION
    loss = -(coefficient * advantages * log_pi).sum() / window
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_close(trainer: FusedCISPOTrainer, batch: dict[str, Any], exact: list[Tensor]) -> None:
    loss = trainer._compute_loss(trainer.model, batch)
    ours = [loss.detach(), *torch.autograd.grad(loss, list(trainer.model.parameters()))]
    for a, b in zip(ours, exact, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-4


def test_loss_and_gradients_are_trl_s_own(trainer: FusedCISPOTrainer) -> None:
    loss, gradient = check(trainer)
    assert max(loss, gradient) < 1e-4


def test_loss_and_gradients_are_the_formula_s(trainer: FusedCISPOTrainer, batch: dict[str, Any]) -> None:
    anchor = batch["old_per_token_logps"] + 1.5 * noise(batch, 1)
    assert not batch["completion_mask"].all()  # some completions ended early
    batch = batch | {"old_per_token_logps": anchor}
    assert_close(trainer, batch, through_the_logits(trainer, batch, anchor))


def test_a_generator_s_log_probs_are_the_anchor_and_a_token_without_one_is_left_out(
    trainer: FusedCISPOTrainer, batch: dict[str, Any]
) -> None:
    anchor = batch["old_per_token_logps"] + 1.5 * noise(batch, 2)
    anchor[0, 0] = math.nan  # vLLM could not score it
    batch = batch | {"sampling_per_token_logps": anchor}
    assert_close(trainer, batch, through_the_logits(trainer, batch, anchor))


def test_without_any_the_ratio_is_one(trainer: FusedCISPOTrainer, batch: dict[str, Any]) -> None:
    trainer._metrics["train"].clear()
    trainer._compute_loss(trainer.model, {k: x for k, x in batch.items() if k != "old_per_token_logps"})
    assert trainer._metrics["train"]["ratio/min"] == trainer._metrics["train"]["ratio/max"] == [1.0]


def test_a_setting_that_the_loss_does_not_carry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"GRPOConfig.loss_type is 'dapo'; .* expects 'cispo'"):
        make_trainer(str(tmp_path), loss_type="dapo")


def test_it_learns(tmp_path: Path) -> None:
    trainer = make_trainer(str(tmp_path), max_steps=42)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    assert rewards[0] < 0.08 and rewards[-1] > 0.2  # guessing gets 1/27
