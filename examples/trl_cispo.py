"""TRL's GRPOTrainer with our fused policy loss in place of its own CISPO loss: one method is overridden.

    python -m examples.trl_cispo            trains a tiny model, prints its reward
    python -m examples.trl_cispo --check    one batch through both losses, prints by how much they differ

Install with `pip install --no-deps -r requirements/examples.txt`.

What is the same. TRL's loss (`loss_type="cispo"`, GRPOTrainer._compute_loss of TRL 1.16) over the completion
tokens t of a micro-batch is

    −1/normalizer · Σ_t mask_t · sg(min(ρ_t, epsilon_high)) · Â_t · log π(y_t),   ρ_t = π(y_t) / π_old(y_t)

epsilon_high is an absolute bound: our `max_ratio` (left unset, TRL takes epsilon = 0.2, far below 1). The
logits are divided by `temperature`. The normalizer is the number of completion tokens in the accumulation
window over all processes, so each token has the weight 1 / normalizer. On the same batch both losses and
their gradients agree to 1e-4 in FP32.

What differs. TRL's π_old is the *trainer's* policy before the update. If vLLM generates, TRL multiplies by a
second ratio from π_old to the generator (vllm_importance_sampling_correction), truncated separately, which
costs one more pass of the model. Our ratio is π / π_gen, with the *generator's* log-probs and one bound: it
corrects both for stale weights and for differences in the generator's numerics. So set that correction to
False and save the pass. If the generator reports no log-probs (transformers' `generate`), π_old is used
instead, as the weights are the same. Also, the full logits never exist: the head's GEMM, softmax, loss and
gradient are one op over chunks of tokens, in FP32 whatever the type of the weights.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from kernels import CISPO, linear_logprob, policy_loss
from trainer.models.tiny import make_model, make_tokenizer

SUPPORTED = {  # the settings that the loss below implements; others would silently have no effect
    "loss_type": "cispo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
}


class FusedCISPOTrainer(GRPOTrainer):
    """GRPOTrainer whose CISPO loss is `kernels.policy_loss`, for text models.

    ValueError for what it does not support: MoE's auxiliary loss, a head with a bias, other settings than
    those of SUPPORTED.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, expected in SUPPORTED.items():
            if (given := getattr(self.args, name)) != expected:
                raise ValueError(f"GRPOConfig.{name} is {given!r}; FusedCISPOTrainer expects {expected!r}")
        if self.model.get_output_embeddings().bias is not None or self.aux_loss_enabled:
            raise ValueError("FusedCISPOTrainer expects an LM head without bias and no MoE auxiliary loss")
        softcap = getattr(self.model.config, "final_logit_softcapping", None)
        self._logits = {"temperature": self.temperature, "softcap": softcap}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        tokens, mask = inputs["completion_ids"], inputs["completion_mask"].bool()  # (B, T)
        if "tool_mask" in inputs:
            mask = mask & inputs["tool_mask"].bool()
        with self.accelerator.autocast():  # the loss, too: its products are then those of the autocast's type
            states = model(  # through the (perhaps wrapped) model; one position of logits, which is not used
                input_ids=torch.cat([inputs["prompt_ids"], tokens], 1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                output_hidden_states=True,
                use_cache=False,
                logits_to_keep=1,
            ).hidden_states[-1]  # (B, P + T, H), after the last norm
            hidden = states[:, -tokens.shape[1] - 1 : -1][mask]  # (N, H): the states that predict `tokens`
            weight = self.accelerator.unwrap_model(model).get_output_embeddings().weight
            logprobs_gen = self._logprobs_gen(inputs, mask, hidden, weight)
            out = policy_loss(
                hidden,
                weight,
                tokens[mask],
                logprobs_gen=logprobs_gen,
                advantages=inputs["advantages"].view(len(mask), -1).expand_as(mask)[mask],
                token_weights=logprobs_gen.isfinite() / self._normalizer(inputs),  # vLLM: NaN if not scored
                objective=CISPO(self.epsilon_high),
                reduce="mean",  # under FSDP2
                **self._logits,
            )
        mode = "train" if self.model.training else "eval"
        for name, value in out.stats.items():
            self._metrics[mode][name].append(self.accelerator.gather(value).nanmean().item())
        return out.loss

    def _logprobs_gen(self, inputs: dict[str, Any], mask: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        """(N,) the generator's log-probs, else π_old's, else (on policy) those of π."""
        for name in ("sampling_per_token_logps", "old_per_token_logps"):
            if name in inputs:
                return inputs[name][mask].float()
        tokens = inputs["completion_ids"][mask]
        return linear_logprob(hidden.detach(), weight.detach(), tokens, **self._logits).logprobs

    def _normalizer(self, inputs: dict[str, Any]) -> Tensor:
        """As in TRL: completion tokens per process in an accumulation window; in evaluation, in the batch."""
        tokens: Tensor = inputs["num_items_in_batch"].clamp(min=1).float() / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return tokens


COMPLETION = 8  # tokens


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of the completion's tokens that equal the prompt's first digit; guessing gets 1/27."""
    return [text.count(prompt[0]) / COMPLETION for prompt, text in zip(prompts, completions, strict=True)]


def make_trainer(folder: str, cls: type[GRPOTrainer] = FusedCISPOTrainer, **options: Any) -> GRPOTrainer:
    """A trainer for a random 0.16 M Qwen3 on the CPU, in FP32. Batches are used twice, so that ratios differ
    from 1."""
    torch.manual_seed(0)
    settings = {
        "per_device_train_batch_size": 128, "num_generations": 8, "num_iterations": 2, "max_steps": 120,
        "max_completion_length": COMPLETION, "learning_rate": 2e-3, "lr_scheduler_type": "constant",
        "loss_type": "cispo", "epsilon_high": 4.0, "bf16": False, "gradient_checkpointing": False,
        "use_cpu": True, "seed": 0, "logging_steps": 6, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True,
    }  # fmt: skip
    return cls(
        model=make_model(0),
        reward_funcs=reward,
        args=GRPOConfig(folder, **(settings | options)),
        train_dataset=Dataset.from_list([{"prompt": f"{digit}="} for digit in range(10)] * 20),
        processing_class=make_tokenizer(),
    )


def check(trainer: GRPOTrainer) -> tuple[float, float]:
    """Relative differences of loss and gradient to TRL's own, on a batch with ratios around the bound."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    noise = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(0))
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 1.5 * noise
    results = []
    for compute_loss in (GRPOTrainer._compute_loss, FusedCISPOTrainer._compute_loss):
        loss = compute_loss(trainer, trainer.model, inputs)
        gradients = torch.autograd.grad(loss, list(trainer.model.parameters()))
        results.append((loss.detach(), torch.cat([x.flatten() for x in gradients])))
    (theirs, their_gradient), (ours, our_gradient) = results
    return (
        float((ours - theirs).abs() / theirs.abs()),
        float((our_gradient - their_gradient).norm() / their_gradient.norm()),
    )


def main() -> None:
    """Train, or check against TRL's own loss; exits with an error where they differ by more than 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare loss and gradients with TRL's own")
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)
        if not parser.parse_args().check:
            trainer.remove_callback(PrinterCallback)  # its 30 figures a line
            trainer.train()
            for log in trainer.state.log_history[:-1]:
                print(f"step {log['step']:3d}  reward {log['reward']:.2f}  {'█' * round(40 * log['reward'])}")
            return
        loss, gradient = check(trainer)
    print(f"relative difference to TRL's own CISPO: loss {loss:.1e}, gradient {gradient:.1e}")
    if max(loss, gradient) > 1e-4:
        raise SystemExit("expected at most 1e-4")


if __name__ == "__main__":
    torch.set_num_threads(1)  # at this size threads wait for each other
    main()
