"""Supervised fine-tuning (`objective.loss: sft`): a prompt's completions are those of its row in the data.

    row -> Prompt(token_ids, completions) --issued--> Group of these completions -> TrainBatch -> learner

Prompt order, epochs, journal, packing, checkpoints and evaluation are those of a run that samples, so a
resume, a replay and a branch work as they do there, and the held-out pass rate has a curve on the same axis.
Nothing is generated for a step: the engines only evaluate. The loss is −log π of each token of a completion,
its end token included, and with `aggregation: token` their mean over the batch, as in transformers and TRL.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.config import ConfigError, DataConfig
from trainer.controller.context import RolloutContext
from trainer.controller.sampler import IssuedPrompt
from trainer.controller.sources import Row, RowError
from trainer.types import Group, Rollout

# Metrics of samples, of which there are none.
OF_SAMPLES = (
    "train/reward", "train/pass_rate", "train/all_", "train/solved_share", "train/resampled",
    "train/truncated", "train/interrupted", "train/repetitive", "lag/", "verify/", "ratio/", "kl/",
    "mismatch/",
)  # fmt: skip


def completions_of(row: Row, config: DataConfig, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The token ids of the row's completion, or of each in a list, with the end token. RowError without text.

    `tokenizer`: a transformers tokenizer. The text is taken as it is, with its spaces and without a template.
    """
    if (end := tokenizer.eos_token_id) is None:
        raise ConfigError("objective.loss sft: this tokenizer has no end token; expected an eos_token")
    column = config.completion_column or config.answer_column
    is_letter = row.letter and not config.completion_column
    value = row.letter if is_letter else row.value(column, "data.completion_column or answer_column")
    texts = value if isinstance(value, list) and value else [value]
    for text in texts:
        if isinstance(text, bool) or not isinstance(text, str | int) or not str(text).strip():
            expected = "the text of a completion, or a list of such texts"
            raise RowError(f"{column!r} is {str(text)[:60]!r}; expected {expected}")
    return tuple((*tokenizer.encode(str(text), add_special_tokens=False), end) for text in texts)


def supervised_group(ctx: RolloutContext, issued: IssuedPrompt) -> Group:
    """The completions of the prompt's row, as if they had been sampled for the step they are issued for."""
    rollouts = []
    texts = ctx.decode([list(ids) for ids in issued.prompt.completions])
    for ids, text in zip(issued.prompt.completions, texts, strict=True):
        versions = np.full(len(ids), issued.step, np.int32)
        arrays = np.array(ids, np.int32), np.zeros(len(ids), np.float32), versions, np.ones(len(ids), bool)
        rollouts.append(Rollout(*arrays, text, 0.0, "correct", truncated=False, interrupted=False))
    return Group(issued.group_id, issued.epoch, issued.prompt, tuple(rollouts))


def supervised_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics without those of samples; the engines computed no token for it."""
    remaining = {name: value for name, value in metrics.items() if not name.startswith(OF_SAMPLES)}
    return remaining | {"train/rollout_tokens": 0}
