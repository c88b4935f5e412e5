"""Settings of what the learner minimises: the loss and its ratio, KL penalty, critic, advantages, filters."""

import math
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Literal

from kernels.objectives import OBJECTIVES, BuiltIn
from trainer.config.values import (
    ConfigError,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
)

UNBOUND = {"max_ratio": 4.0, "mask_low": 0.5, "mask_high": 5.0}  # the bounds beside a loss without its own


@dataclass(frozen=True, kw_only=True, slots=True)
class KLConfig:
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty; 0: no penalty, and no second model in memory."""
    to: str = "initial"
    """π_ref of the penalty: the frozen `initial` model; the `generator` that sampled the tokens (prime-rl), which needs no second model; or another model with the same tokenizer, such as a teacher, by folder or hub name, or by the URL of a server with OpenAI's `/v1/completions` (vLLM, `python -m trainer.serve`): http://host:port."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key of a teacher behind a URL; `python -m trainer.serve` needs one (SIGMOID_RL_TOKEN). The key itself is written nowhere."""
    deadline_s: PositiveFloat = 120.0
    """Seconds for which a request to a teacher behind a URL is tried again before the run saves and ends; less than pipeline.deadline_s."""
    estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Schulman's estimators, with x = log π/π_ref: k1 = x, k2 = x²/2, k3 = exp(−x) − 1 + x (GRPO); or unbiased = ratio · k3 (DeepSeek-V3.2)."""
    top_k: NonNegativeInt = 0
    """With `place: loss`: the penalty is the forward KL(π_ref ‖ π) over the k likeliest tokens of π_ref at each position, and all others as one, instead of the estimator on the sampled token; 20, say. With `loss: none` it is distillation of those k (docs/distillation.md). 0: the estimator."""
    place: Literal["loss", "reward", "in_advantage", "as_advantage"] = "loss"
    """Add the penalty to each token's loss term (GRPO); subtract it from the reward (InstructGPT): `zero_variance: drop` then compares what is left of it, and `resample` and `advantage_norm: group` are refused; `in_advantage`: subtract log π_gen - log π_ref from each token's advantage, after its norm; `as_advantage`: in place of it, so that rewards are not learned (on-policy distillation, docs/distillation.md). With these two `zero_variance: drop` drops no group."""

    @property
    def by_url(self) -> bool:
        """True if the reference is a teacher that a server scores with."""
        return self.coefficient > 0 and self.to.startswith(("http://", "https://"))

    @property
    def has_advantage(self) -> bool:
        """True if each token has an advantage by the reference."""
        return self.coefficient > 0 and self.place in ("in_advantage", "as_advantage")


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticConfig:
    body: Literal["none", "own", "shared"] = "none"
    """Value network for the advantages (PPO): a model of its own that starts as the policy, a head on the policy's body (which then learns both), or none: the group mean is the baseline."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute type of a value network of its own; its master weights are FP32, and float16 scales its loss."""
    lr: PositiveFloat | None = None
    """AdamW learning rate of the value network, or of the head on a shared body; learner.schedule and the warm-up apply to it, too. Null: 5 times learner.lr, the ratio of arXiv 2503.24290."""
    gamma: Annotated[float, Range(0, most=1)] = 1.0
    """Discount per sampled token."""
    gae_lambda: Annotated[float, Range(0, most=1)] = 0.95
    """λ of generalised advantage estimation (GAE)."""
    value_clip: NonNegativeFloat = 0.2
    """Clip the new value to this distance from the old one in the value loss; 0: plain squared error."""
    coefficient: PositiveFloat = 0.5
    """Weight of the value loss of a head on a shared body. A network of its own has an AdamW of its own, to which the weight would make no difference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    loss: str = "cispo"
    """`cispo` (ScaleRL), `tis`, `reinforce`, `grpo` or `ppo` (clip ±.2), `dapo` (clip .2/.28), `dual_clip`, `gspo`, `luspo` (the same; with `aggregation: sum`), `gmpo`, `icepop`, `dppo` (a mask on |π − μ|) or `dppo_kl`, `drpo`, `sapo` (a smooth gate, τ 1 and 1.05), `seq_tis`, `seq_mis`, `vespo`, `m2po`, `clip_cov`, `kl_cov`, `sft` (supervised: on completions of the data, docs/sft.md), `none` (penalties alone), or your own `module:function(logp, logprobs_gen, advantages) -> kernels.Term`. All: {losses}."""
    max_ratio: Annotated[float, Range(above=0, most=math.inf)] | None = None
    """Upper bound on the ratio ρ, absolute, of `cispo` (its ρ_max; {4, 5, 8} are equal within noise), `tis`, `seq_tis` and `mismatch: truncate`. null: the loss's own (4; tis and seq_tis 2), which the run's config.yaml then has as a number."""
    clip_low: Annotated[float, Range(0, most=1)] | None = None
    """ε⁻ of the clip: ratios below 1 − ε⁻ are clipped. null: the loss's own (.2; gspo 3e-4; gmpo .4, of the log-ratio; dppo .2 and dppo_kl .05, of the divergence; clip_cov 1)."""
    clip_high: Annotated[float, Range(0, most=math.inf)] | None = None
    """ε⁺ of the clip: ratios above 1 + ε⁺ are clipped. null: the loss's own (.2; dapo .28; gspo 4e-4; others as clip_low)."""
    mask_low: NonNegativeFloat | None = None
    """Least ratio that `icepop`, `seq_mis`, `mismatch: mask` and `sequence_mask` keep. null: .5, as with max_ratio."""
    mask_high: Annotated[float, Range(above=0, most=math.inf)] | None = None
    """Greatest ratio that `icepop`, `seq_mis`, `mismatch: mask` and `sequence_mask` keep. null: the loss's own (5; seq_mis 2), as with max_ratio."""
    anchor: Literal["generator", "recomputed"] = "generator"
    """Denominator of the ratio: the generator's log-probs (ScaleRL), or those that the learner recomputes before its first step on the data. With one step per batch the latter ratio is always 1."""
    mismatch: Literal["none", "truncate", "mask"] = "none"
    """Correction with `anchor: recomputed`: weigh each token's term by k = π_recomputed / π_generator, truncated at max_ratio, or masked outside mask_low to mask_high."""
    sequence_mask: Literal["none", "product", "mean", "negative"] = "none"
    """Completions that leave the loss by their ratio, the `product` or the geometric `mean` of their tokens', outside mask_low to mask_high; `negative`: by the mean below mask_low, with a negative advantage only (DeepSeek-V3.2, mask_low = exp(−δ))."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the entropy, added to each token's objective."""
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    aggregation: Literal["prompt", "sample", "token", "sum"] = "prompt"
    """Unit of equal weight in the loss: each prompt (ScaleRL), each completion (GRPO), each token of the batch (DAPO's code); or every token has 1 / (completions · longest completion) (Dr. GRPO)."""
    advantage_norm: Literal["batch", "group", "running", "global", "none"] = "batch"
    """Divide r − group mean by the std of the batch's advantages (ScaleRL), by the group's reward std (GRPO), by mean and std over all batches so far, by `global_std`, or by nothing. With a critic, whose advantages are per token: `batch` is mean and std over the batch's tokens, and `group` is refused."""
    global_std: PositiveFloat = 1.0
    """Divisor of `advantage_norm: global`."""
    std_over: Literal["surviving", "all"] = "surviving"
    """Completions whose advantages give the batch's std: those in the loss, or all, with the zeros of groups that were dropped."""
    zero_variance: Literal["drop", "keep", "resample"] = "drop"
    """Groups whose rewards are all equal: out of the loss and of every denominator (ScaleRL), kept, or replaced by further groups until the batch is full (DAPO). With a critic `drop` drops none, since advantages to its values are not zero, and `resample` is refused."""
    resample_limit: PositiveInt = 10
    """Groups generated for a batch at most with `resample`, in batches; then it is trained as it is."""
    drop_truncated: bool = False
    """Leave completions cut at the token limit out of the loss (not one of ScaleRL's eight choices). Their rewards count in the group mean; zero variance is judged without them."""

    def __post_init__(self) -> None:
        entry = self.built_in or BuiltIn(dict)
        usual = {key: signature(entry.make).parameters[name].default for key, name in entry.settings.items()}
        for key, bound in UNBOUND.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, usual.get(key, bound))

    @property
    def built_in(self) -> BuiltIn | None:
        """The entry of the loss in the kernels' table, None if the loss is the user's own.

        IcePop with a recomputed anchor consists of GRPO's clip and of `token_mismatch`.
        """
        return OBJECTIVES.get("grpo" if self._is_split_icepop else self.loss)

    @property
    def loss_settings(self) -> dict[str, float]:
        """The settings that built-in losses take, by their key in the table, without those that are null."""
        values = {key: getattr(self, key) for entry in OBJECTIVES.values() for key in entry.settings}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def token_mismatch(self) -> str:
        """`mismatch`, or `mask` for IcePop with a recomputed anchor."""
        return "mask" if self._is_split_icepop else self.mismatch

    @property
    def _is_split_icepop(self) -> bool:
        return (self.loss, self.anchor) == ("icepop", "recomputed")

    @property
    def supervised(self) -> bool:
        """True if the completions are those of the data, and none is sampled to be trained on."""
        return self.loss == "sft"

    @property
    def has_critic(self) -> bool:
        """True if a value network, and not the group's mean, is the baseline of the advantages."""
        return self.critic.body != "none"

    @property
    def needs_scores(self) -> bool:
        """True if the learner must score the data before its first step on it."""
        return self.needs_logprobs or self.scores_reference

    @property
    def needs_reference(self) -> bool:
        """True if a frozen model, the initial one or a teacher, is the reference of a penalty, in the learner."""
        return self.kl.coefficient > 0 and self.kl.to != "generator" and not self.kl.by_url

    @property
    def scores_reference(self) -> bool:
        """True if these scores include that model's; the likeliest tokens are computed in the step itself."""
        return self.needs_reference and not self.kl.top_k

    @property
    def needs_logprobs(self) -> bool:
        """True if these scores include the policy's log-probs, and not the reference model's alone."""
        kl_in_reward = self.kl.coefficient > 0 and self.kl.place == "reward"
        return self.anchor == "recomputed" or kl_in_reward or self.has_critic


def losses_with(key: str) -> list[str]:
    """The built-in losses that take this setting."""
    return [loss for loss, entry in OBJECTIVES.items() if key in entry.settings]


def check_objective(objective: ObjectiveConfig) -> None:
    """ConfigError for an objective that does not exist, or settings that it cannot have or would not use."""
    if problem := _loss_problem(objective) or _combination_problem(objective):
        raise ConfigError(f"objective: {problem}")


def _loss_problem(objective: ObjectiveConfig) -> str:
    """The error in the loss and its own settings; empty if there is none."""
    loss, built_in = objective.loss, objective.built_in
    settings = {} if built_in is None else built_in.settings
    module, _, function = loss.partition(":")
    if built_in is None and not (module and function.isidentifier()):
        return f"loss {loss!r}: expected one of {', '.join(OBJECTIVES)}, or module:function"
    if objective.loss_settings.keys() & {"clip_low", "clip_high"} and "clip_low" not in settings:
        return (
            f"clip_low and clip_high are of {', '.join(losses_with('clip_low'))}, and of icepop with anchor "
            f"recomputed; given with loss {loss} and anchor {objective.anchor}"
        )
    masks = "mask_low" in settings or objective.token_mismatch == "mask" or objective.sequence_mask != "none"
    if masks and objective.loss_settings["mask_low"] >= objective.loss_settings["mask_high"]:
        return f"expected mask_low < mask_high, given {objective.mask_low} and {objective.mask_high}"
    return ""


def _combination_problem(objective: ObjectiveConfig) -> str:
    """The settings that do not go together; empty if all do."""
    loss, built_in, critic = objective.loss, objective.built_in, objective.critic
    over_sequences = built_in is not None and built_in.over_sequences
    has_k = loss == "icepop" or over_sequences or objective.anchor != "recomputed"
    if objective.mismatch != "none" and has_k:
        return (
            f"mismatch {objective.mismatch} needs anchor recomputed, and a loss that is neither icepop (it "
            f"masks by itself) nor one over sequences such as gspo; given {objective.anchor} and {loss}"
        )
    if objective.kl.coefficient and objective.kl.to == "generator" and objective.kl.place != "loss":
        place = objective.kl.place
        return f"kl.place {place} needs kl.to initial or a model; a penalty to the generator is a part of the loss"
    if objective.kl.top_k and (objective.kl.place != "loss" or not objective.needs_reference):
        return (
            "kl.top_k takes the distribution of a model in the learner: expected kl.place loss, a coefficient above "
            f"0, and kl.to initial or a model by folder; given {objective.kl.place}, {objective.kl.coefficient:g}, "
            f"{objective.kl.to}"
        )
    if objective.kl.has_advantage and objective.kl.estimator != "k1":
        return f"kl.place {objective.kl.place} takes log π - log π_ref: expected estimator k1, given {objective.kl.estimator}"
    if objective.kl.has_advantage and (over_sequences or objective.zero_variance == "resample"):
        problem = f"{loss} has one advantage a completion" if over_sequences else "resample replaces groups"
        return f"{problem}, and with kl.place {objective.kl.place} every token of every group has one; expected another"
    if objective.supervised and (wrong := _of_samples(objective)):
        return f"loss sft trains on the data's completions, of which there is {wrong}"
    if over_sequences and objective.has_critic:
        return f"{loss} needs one advantage a completion, a critic gives one a token; set critic.body none"
    grouped = objective.advantage_norm == "group" or objective.zero_variance == "resample"
    if grouped and (objective.has_critic or (objective.kl.coefficient and objective.kl.place == "reward")):
        return (
            f"{'a critic' if objective.has_critic else 'kl.place reward'} does not go with a norm or resampling "
            "by the group's task rewards: expected advantage_norm batch, running, global or none, and "
            f"zero_variance drop or keep; given {objective.advantage_norm} and {objective.zero_variance}"
        )
    if critic.body == "own" and critic.coefficient != CriticConfig().coefficient:
        return (
            f"critic.coefficient is {critic.coefficient}, but a value network of its own has an AdamW of its "
            "own, to which the weight of its loss makes no difference; expected 0.5, the default"
        )
    if critic.body == "shared" and critic.dtype != "float32":
        return f"critic.dtype is {critic.dtype}; expected float32, as a shared body's head has, or critic.body own"
    return ""


def _of_samples(objective: ObjectiveConfig) -> str:
    """The first setting that needs samples of the policy, and what is expected; empty if there is none."""
    for key, value, expected in (
        ("zero_variance", objective.zero_variance, "keep"),
        ("critic.body", objective.critic.body, "none"),
        ("kl.coefficient", objective.kl.coefficient, 0),
        ("anchor", objective.anchor, "generator"),
        ("sequence_mask", objective.sequence_mask, "none"),
    ):
        if value != expected:
            return f"no reward, generator or value: expected objective.{key} {expected}, given {value}"
    return ""
