"""The promise to users of TRL: every loss of TRL 1.16 that docs/options.md equates with ours is the same.

TRL's own trainers compute theirs, from one random batch through a tiny model in FP32; ours comes from the
model's hidden states. Compared are the loss and the gradients of all parameters.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="trl is missing: pip install --no-deps -r requirements/examples.txt")

import trl
from datasets import Dataset
from trl.experimental import gmpo

import kernels
from kernels import GRPO, KL, Masked, OutsideBand, linear_logprob, policy_loss, token_weights
from trainer.models.tiny import make_model, make_tokenizer

UNBOUNDED = (kernels.SAPO(1.5, 2.5), kernels.VESPO())
TOLERANCE = 1e-5  # relative, of the loss and of the gradient's norm
PROMPT, LONGEST, TEMPERATURE = 5, 12, 0.8
LENGTHS = torch.tensor([12, 1, 7, 3, 12, 5, 2, 9])  # tokens of each completion
PROMPTS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
COMPLETIONS, TOKENS = len(LENGTHS), int(LENGTHS.sum())
MASK = torch.arange(LONGEST) < LENGTHS[:, None]  # (C, L); X[MASK] is flat: N tokens
SEQUENCES = torch.arange(COMPLETIONS).repeat_interleave(LENGTHS)  # (N,)
ADVANTAGES = torch.tensor([1.3, -0.4, -1.1, 0.2, -0.8, 0.9, 0.0, -0.3])  # (C,)
PER_TOKEN = ADVANTAGES[SEQUENCES]  # (N,)


@dataclass(frozen=True)
class Batch:
    """What TRL's `_compute_loss` takes, and the same tokens flat."""

    inputs: dict[str, Tensor]
    gen: Tensor  # (N,) log-probs that the ratio is taken to
    ref: Tensor  # (N,)


@dataclass(frozen=True)
class Case:
    """TRL's options, and what gives the same loss here."""

    theirs: dict[str, Any]
    objective: Any
    aggregation: str
    scale: float = 1.0  # our token weights times this
    ours: dict[str, Any] = field(default_factory=dict)  # further arguments of `policy_loss`
    trainer: str = "GRPO"


PER_COMPLETION, DR_GRPO = 1 / COMPLETIONS, 1 / (COMPLETIONS * LONGEST)
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.15, "epsilon_high": 0.1}
PLAIN_KL = {"use_bias_correction_kl": False}  # TRL's default multiplies the penalty by ρ
CASES = {
    "grpo": Case({"loss_type": "grpo"}, GRPO(), "sample"),
    "grpo with KL": Case(
        {"loss_type": "grpo", "beta": 0.3} | PLAIN_KL, GRPO(), "sample", ours={"kl": KL(0.3, "k3")}
    ),
    "grpo, two-sided": Case({"loss_type": "grpo", "delta": 1.6}, kernels.Clip(0.2, 0.2, dual=1.6), "sample"),
    "dapo": Case({"loss_type": "dapo", "epsilon_high": 0.28}, kernels.DAPO(), "token"),
    "dapo with entropy": Case(
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.4}, kernels.DAPO(), "token",
        ours={"entropy_bonus": 0.4},
    ),
    "bnpo": Case({"loss_type": "bnpo"}, GRPO(), "token"),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, GRPO(), "sum", DR_GRPO),
    "cispo": Case({"loss_type": "cispo", "epsilon_high": 1.5}, kernels.CISPO(1.5), "token"),
    "cispo with KL": Case(
        {"loss_type": "cispo", "epsilon_high": 1.5, "beta": 0.1} | PLAIN_KL, kernels.CISPO(1.5), "token",
        ours={"kl": KL(0.1, "k3")},
    ),
    "gspo": Case({"loss_type": "grpo"} | SEQUENCE, kernels.GSPO(0.15, 0.1), "sample"),
    "luspo": Case({"loss_type": "luspo"} | SEQUENCE, kernels.GSPO(0.15, 0.1), "sum", PER_COMPLETION),
    "vespo": Case({"loss_type": "vespo"}, kernels.VESPO(), "token"),
    "gmpo": Case({"epsilon": 0.15, "epsilon_high": 0.1}, kernels.GMPO(0.15, 0.1), "sample", trainer="GMPO"),
    "off-policy mask": Case(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        Masked(GRPO(), OutsideBand(math.exp(-0.05), negative=True)), "sample",
    ),
    "grpo with its own KL": Case(
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True}, GRPO(), "sample",
        ours={"kl": KL(0.3, "unbiased")},
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.5},
        kernels.SAPO(1.5, 2.5), "sample",
    ),
}  # fmt: skip


def trl_trainer(folder: Any, name: str = "GRPO", **options: Any) -> Any:
    """TRL's trainer of a random Qwen3, on the CPU in FP32; all of a step is one micro-batch."""
    needs_more = ("beta", "use_vllm")  # a second model, a server: the loss needs neither
    arguments = {key: x for key, x in options.items() if key not in needs_more}
    settings = {
        "per_device_train_batch_size": COMPLETIONS, "num_generations": 4, "temperature": TEMPERATURE,
        "max_completion_length": LONGEST, "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "beta": 0.0,
    }  # fmt: skip
    source = gmpo if name == "GMPO" else trl
    trainer = getattr(source, f"{name}Trainer")(
        model=make_model(0),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=getattr(source, f"{name}Config")(str(folder), **(settings | arguments)),
        train_dataset=Dataset.from_list([{"prompt": "1="}] * COMPLETIONS),
        processing_class=make_tokenizer(),
    )
    for key in options.keys() - arguments.keys():
        setattr(trainer, key, options[key])
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def hidden_states(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(N, H) the states that predict the completion tokens."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    states = model.model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    return states[:, PROMPT - 1 : -1][MASK]


@torch.no_grad()
def score(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(N,) log-probs and (N,) entropy of the completion tokens."""
    states = hidden_states(model, inputs)
    ids = inputs["completion_ids"][MASK]
    out = linear_logprob(states, model.lm_head.weight, ids, temperature=TEMPERATURE)
    return out.logprobs, out.entropy


def make_batch(model: Any, seed: int = 0) -> Batch:
    """Prompts of several lengths, and ratios within and beyond every bound of CASES."""
    g = torch.Generator().manual_seed(seed)
    tokens = lambda *shape: torch.randint(3, model.config.vocab_size, shape, generator=g)  # noqa: E731
    starts = torch.tensor([0, 0, 0, 0, 2, 2, 2, 2])[:, None]
    inputs = {
        "prompt_ids": tokens(COMPLETIONS, PROMPT),
        "prompt_mask": (torch.arange(PROMPT) >= starts).long(),
        "completion_ids": tokens(COMPLETIONS, LONGEST),
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "num_items_in_batch": MASK.sum(),
    }
    logp = score(model, inputs)[0]
    gen = logp + 0.4 * torch.randn(TOKENS, generator=g)
    gen += 0.2 * torch.randn(COMPLETIONS, generator=g)[SEQUENCES]
    ref = logp + 0.5 * torch.randn(TOKENS, generator=g)
    for name, flat in {"old_per_token_logps": gen, "ref_per_token_logps": ref}.items():
        inputs[name] = torch.zeros(MASK.shape).masked_scatter_(MASK, flat)
    return Batch(inputs, gen, ref)


def gradients(loss: Tensor, model: Any) -> Tensor:
    return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])


def ours(trainer: Any, batch: Batch, case: Case, weights: Tensor | None = None, **changed: Tensor) -> Tensor:
    """Our loss; `weights` (N,) multiply the token weights, `changed` replaces inputs of `policy_loss`."""
    model = trainer.model
    given = {
        "logprobs_gen": batch.gen,
        "advantages": PER_TOKEN,
        "token_weights": case.scale * token_weights(LENGTHS, PROMPTS, case.aggregation),
        "sequences": SEQUENCES,
        "logprobs_ref": batch.ref if "kl" in case.ours else None,
    } | changed
    if weights is not None:
        given["token_weights"] = given["token_weights"] * weights
    return policy_loss(
        hidden_states(model, batch.inputs), model.lm_head.weight, batch.inputs["completion_ids"][MASK],
        objective=case.objective, temperature=TEMPERATURE, **given, **case.ours,
    ).loss  # fmt: skip


def assert_same(trainer: Any, theirs: Tensor, mine: Tensor, loss: bool = True) -> None:
    """The gradients are the same and, unless it has another constant, so is the loss."""
    assert not loss or float((mine - theirs).detach().abs() / theirs.detach().abs()) < TOLERANCE
    expected = gradients(theirs, trainer.model)
    assert float(expected.norm()) > 1e-3
    assert float((gradients(mine, trainer.model) - expected).norm() / expected.norm()) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_trl_s(name: str, tmp_path: Any) -> None:
    case = CASES[name]
    trainer = trl_trainer(tmp_path, case.trainer, **case.theirs)
    batch = make_batch(trainer.model)
    assert_same(trainer, trainer._compute_loss(trainer.model, batch.inputs), ours(trainer, batch, case))


def test_the_ratios_are_within_and_beyond_the_bounds_for_both_signs_of_the_advantage() -> None:
    """Otherwise the comparison above would say nothing of the clips."""
    model = make_model(0)
    batch = make_batch(model)
    states, head = hidden_states(model, batch.inputs), model.lm_head.weight
    rest = {"token_weights": torch.ones(TOKENS), "sequences": SEQUENCES, "logprobs_gen": batch.gen}
    for objective in {case.objective for case in CASES.values() if case.objective not in UNBOUNDED}:
        for sign in (-1.0, 1.0):
            out = policy_loss(
                states, head, batch.inputs["completion_ids"][MASK], objective=objective,
                temperature=TEMPERATURE, advantages=torch.full((TOKENS,), sign), **rest,
            )  # fmt: skip
            assert 0.05 < float(out.stats["ratio/truncated"]) < 0.95


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_vllm_s_importance_ratio_multiplies_the_advantages_so_that_kl_is_without_it(
    beta: float, tmp_path: Any
) -> None:
    trainer = trl_trainer(tmp_path, loss_type="grpo", use_vllm=True, beta=beta, **PLAIN_KL)
    batch = make_batch(trainer.model)
    ratio = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)).mul(3).clamp(max=2)
    ratio[::5] = 0  # masked
    padded = torch.ones(MASK.shape).masked_scatter_(MASK, ratio)
    theirs = trainer._compute_loss(trainer.model, batch.inputs | {"importance_sampling_ratio": padded})
    case = Case({}, GRPO(), "sample", ours={"kl": KL(beta)} if beta else {})
    assert_same(trainer, theirs, ours(trainer, batch, case, advantages=PER_TOKEN * ratio))


def test_on_policy_trl_s_default_kl_penalty_has_the_gradient_of_our_k2(tmp_path: Any) -> None:
    """It is ρ · k3 with the ratio differentiated: ρ' k3 + ρ k3' = ρ (e^−x − 1 + x + 1 − e^−x) = ρ x."""
    trainer = trl_trainer(tmp_path, loss_type="grpo", beta=0.3, use_bias_correction_kl=True)
    batch = make_batch(trainer.model)
    del batch.inputs["old_per_token_logps"]
    theirs = trainer._compute_loss(trainer.model, batch.inputs)
    case = Case({}, GRPO(), "sample", ours={"kl": KL(0.3, "k2")})
    mine = ours(trainer, batch, case, logprobs_gen=score(trainer.model, batch.inputs)[0])
    assert_same(trainer, theirs, mine, loss=False)


def test_the_top_entropy_quantile_of_trl_is_a_mask_on_the_token_weights(tmp_path: Any) -> None:
    trainer = trl_trainer(tmp_path, loss_type="dapo", epsilon_high=0.28, top_entropy_quantile=0.3)
    batch = make_batch(trainer.model)
    entropy = score(trainer.model, batch.inputs)[1]
    mask = entropy >= torch.quantile(entropy, 0.7)
    mine = ours(trainer, batch, CASES["dapo"], weights=mask)
    assert_same(trainer, trainer._compute_loss(trainer.model, batch.inputs), mine)


def test_trl_s_grpo_counts_completions_without_a_loss_token_and_ours_does_not(tmp_path: Any) -> None:
    """As after `mask_truncated_completions`: two of the eight completions leave."""
    trainer = trl_trainer(tmp_path, loss_type="grpo")
    batch = make_batch(trainer.model)
    left = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1])
    theirs = trainer._compute_loss(trainer.model, batch.inputs | {"tool_mask": left[:, None].expand_as(MASK)})
    weights = torch.zeros(TOKENS)
    weights[left[SEQUENCES] == 1] = token_weights(LENGTHS[left == 1], PROMPTS[left == 1], "sample")
    assert_same(trainer, theirs, ours(trainer, batch, CASES["grpo"], token_weights=weights * 6 / 8))


def test_trl_s_rloo_on_its_own_samples_is_reinforce_over_the_sum_of_a_completion_s_tokens(
    tmp_path: Any,
) -> None:
    """RLOO's ratio is of whole completions, and 1 there; only its gradient is ours; its loss is −mean Â."""
    trainer = trl_trainer(tmp_path, "RLOO")
    batch = make_batch(trainer.model)
    logp = score(trainer.model, batch.inputs)[0]
    old = torch.zeros(MASK.shape).masked_scatter_(MASK, logp).sum(1)
    theirs = trainer._compute_loss(trainer.model, batch.inputs | {"old_logps": old})
    assert theirs.item() == pytest.approx(-float(ADVANTAGES.mean()), rel=1e-4)
    mine = ours(trainer, batch, Case({}, kernels.REINFORCE(), "sum", PER_COMPLETION))
    assert_same(trainer, theirs, mine, loss=False)
