"""Promise of accounting/flops.py: of a mixture of experts, those count that a token is routed to."""

from pathlib import Path

import pytest
import transformers as tr
from training import config, learner, make_model

from trainer.accounting.flops import experts_per_token

EMBEDDINGS = 31 * 32  # also the head's size
ATTENTION = 2 * 32 * 32 + 2 * 32 * 16  # q, o; k, v
NORMS, QK_NORMS, ROUTER, EXPERT = 2 * 32, 2 * 8, 4 * 32, 3 * 32 * 16
LAYERS = {  # with 2 of 4 experts
    "moe": 2 * (ATTENTION + NORMS + QK_NORMS + ROUTER + 2 * EXPERT),
    "untied": 2 * (ATTENTION + NORMS + 3 * 32 * 48),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_are_those_that_a_token_passes_through(kind: str, tmp_path: Path) -> None:
    one = learner(make_model(kind, tmp_path), config())
    assert one.active_parameters == 2 * EMBEDDINGS + LAYERS[kind] + 32
    total = sum(w.numel() for w in one.weights.values())
    assert total - one.active_parameters == (2 * 2 * EXPERT if kind == "moe" else 0)


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        (tr.MixtralConfig(), 2),
        (tr.GptOssConfig(), 4),
        (tr.Gemma4TextConfig(top_k_experts=8), 8),
        (tr.AriaTextConfig(), 2),
        (tr.LlamaConfig(), None),
    ],
)
def test_families_name_a_tokens_experts_each_in_its_way(
    config: tr.PretrainedConfig, experts: int | None
) -> None:
    assert experts_per_token(config.to_dict()) == experts
