"""Signs that a training goes wrong, in the metrics of its steps; each says what to do.

A sign is reported once it has held for IN_A_ROW steps (a skipped step at once, equal rewards, and with
them unreadable answers, after 5, wrong answers after 10, a value network that does not learn after 20), and
again only after a step without it. The limits are far from what healthy runs show; that of truncation is the
paper's (arXiv 2510.13786: runs above 10 % became unstable).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

IN_A_ROW = 3  # steps
FIRST = 5  # steps whose mean is what later ones are compared with
COLLAPSED = 0.05  # entropy below this share of the first steps' has collapsed


@dataclass(frozen=True, slots=True)
class Sign:
    """A fault of a metric, and what helps against it."""

    metric: str
    is_wrong: Callable[[float, float], bool]  # of the metric's value, and its mean over the first steps
    text: str  # with {value} and {first}
    in_a_row: int = IN_A_ROW  # steps for which it must hold
    unless: str = ""  # a metric that must be 0


SIGNS = {
    "skipped": Sign(
        "learner/skipped_steps",
        lambda value, first: value > 0,
        "loss or gradient were not finite, so the step was skipped and the weights are those before it; the "
        "third in a row ends the run (learner/skipped_why). Lower learner.lr",
        in_a_row=1,
    ),
    "ess": Sign(
        "ratio/ess",
        lambda value, first: value < 0.5,
        "the importance ratios leave only {value:.0%} of the batch's tokens effective: the policy has moved "
        "far from the weights that generated them. Lower learner.lr or pipeline.max_lag",
    ),
    "ratio": Sign(
        "ratio/mean",
        lambda value, first: not 0.8 < value < 1.25,
        "the mean importance ratio is {value:.3g}, where 1 is expected: learner and engine disagree. Compare "
        "the agreement that the log states at the start, and lower learner.lr",
    ),
    "kl": Sign(
        "kl/k3",
        lambda value, first: value > 0.1,
        "the policy is {value:.2g} nats per token away from the one that generated. Lower learner.lr or "
        "pipeline.max_lag",
    ),
    "entropy": Sign(
        "learner/entropy",
        lambda value, first: value < COLLAPSED * first,
        "the entropy has fallen from {first:.2g} to {value:.2g} nats: completions are hardly sampled any "
        "more. Lower learner.lr, raise objective.max_ratio or clip_high, or add an entropy bonus",
    ),
    "signal": Sign(
        "train/effective_prompts",
        lambda value, first: value == 0,
        "for {steps} steps in a row no prompt had two different rewards, so nothing is learned. If all are "
        "right (train/all_right), the task is solved; else take easier prompts, a model that is right "
        "sometimes (python -m trainer.evaluate), more completions_per_prompt, or a reward for a part",
        in_a_row=5,
    ),
    "hard": Sign(
        "train/all_wrong",
        lambda value, first: value > max(0.9, 0.97 * first),  # fewer than at the start: it learns
        "{value:.0%} of the prompts have wrong answers alone, for {steps} steps: the task is too hard for "
        "this model, or the template or the verifier is wrong. Read samples.jsonl; take easier prompts, a "
        "longer engine.max_new_tokens, more completions_per_prompt, or a model that is right sometimes",
        in_a_row=10,
    ),
    "unread": Sign(
        "verify/unparsable",
        lambda value, first: value > 0.9,
        "in {value:.0%} of the completions the verifier finds no answer, for {steps} steps. Read "
        "samples.jsonl; ask for the format that verifier.kind reads (data.template, data.system), set "
        "data.chat for a chat model, raise engine.max_new_tokens if they are cut, or take another verifier",
        in_a_row=5,
        unless="train/effective_prompts",  # a base model learns the format first
    ),
    "truncation": Sign(
        "train/truncated",
        lambda value, first: value > max(0.1, 1.5 * first),  # a low limit at the start is no change
        "{value:.0%} of the completions are cut at the token limit; above 10 % runs became unstable. Raise "
        "engine.max_new_tokens, turn on engine.interruption or a length penalty",
    ),
    "value": Sign(
        "critic/explained_variance",
        lambda value, first: value < 0.05,
        "for {steps} steps in a row the value network has explained less than 5 % of the variance of the "
        "returns, so it is no baseline. Raise objective.critic.lr (null follows learner.lr), or set "
        "objective.critic.body none",
        in_a_row=20,
    ),
    "repetition": Sign(
        "train/repetitive",
        lambda value, first: value > 0.1,
        "{value:.0%} of the completions repeat themselves. Read samples.jsonl; lower learner.lr, and resume "
        "from a checkpoint before it began",
    ),
}


class Guards:
    """The signs of one run, step after step."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {name: [] for name in SIGNS}
        self._held = dict.fromkeys(SIGNS, 0)  # steps in a row

    def check(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The signs that are reported with this step's metrics, by name."""
        signs = {}
        for name, sign in SIGNS.items():
            value = row.get(sign.metric)
            if not isinstance(value, int | float) or row.get(sign.unless):
                self._held[name] = 0
                continue
            first = self._first[name]
            if len(first) < FIRST:
                first.append(float(value))
            mean = sum(first) / len(first)
            self._held[name] = self._held[name] + 1 if sign.is_wrong(value, mean) else 0
            if self._held[name] == sign.in_a_row:
                signs[name] = sign.text.format(value=value, first=mean, steps=sign.in_a_row)
        return signs
