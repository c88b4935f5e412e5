"""The promise of the fused body: a model computes what it does without, and keeps its parameters' names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from test_ranks import free_port, one_step
from torch import Tensor
from training import MODELS, SHAPE, config, error, make_model, sequences

from kernels import backend_info
from kernels.triton.config import INTERPRET
from trainer.learner import critic, fused_body, learner
from trainer.learner.fused_body import fuse, fuse_on
from trainer.learner.packing import MicroBatch, pack
from trainer.learner.policy_model import hidden_states, load, prepare
from trainer.learner.ranks import init_ranks

CONFIGS: dict[str, tr.PretrainedConfig] = {
    "llama": tr.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama3's RoPE": tr.LlamaConfig(
        **SHAPE, rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    ),
    "mistral": tr.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": tr.Qwen2Config(**SHAPE),
    "qwen3": tr.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": MODELS["moe"],
}  # fmt: skip
OPS = ("rms_norm", "fused_add_rms_norm", "fused_qk_norm_rope", "swiglu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A folder with a model of each family, all of whose weights are random, the norms' too."""

    def made(family: str) -> str:
        folder = tmp_path_factory.getbasetemp() / f"fused-{family}"
        if not folder.exists():
            torch.manual_seed(3)
            lm = tr.AutoModelForCausalLM.from_config(CONFIGS[family])
            for p in lm.parameters():
                p.data.normal_(0, 0.2) if p.dim() > 1 else p.data.add_(torch.randn_like(p), alpha=0.3)
            lm.save_pretrained(folder)
        return str(folder)

    return made


def micro_batch() -> MicroBatch:
    (m,) = pack(sequences(), 10_000)
    return m


def run(
    folder: str, dtype: torch.dtype = torch.float32, fused: bool = False, checkpointed: bool = False
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Logits, gradients by name, and the names in the state dict."""
    lm = load(folder)
    prepare(lm, checkpointed)
    if fused:
        assert fuse(lm, dtype)
    hidden = hidden_states(lm.base_model, micro_batch(), dtype).float()
    logits = hidden @ lm.get_output_embeddings().weight.T
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * upstream).sum().backward()
    gradients = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return logits.detach(), gradients, list(lm.state_dict())


def distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_gradients_are_the_unfused_models(
    family: str, checkpointed: bool, folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(folders(family))
    calls = dict.fromkeys(OPS, 0)
    for name in OPS:

        def counted(op: Any, name: str, *args: Any, **options: Any) -> Any:
            calls[name] += 1
            return op(*args, **options)

        monkeypatch.setattr(fused_body, name, partial(counted, getattr(fused_body, name), name))
    fused = run(folders(family), fused=True, checkpointed=checkpointed)
    layers = 2 * (1 + checkpointed)  # each is computed twice
    gated = 0 if family == "qwen3_moe" else layers
    assert calls == dict(zip(OPS, (layers + 1, layers, layers, gated), strict=True))
    assert fused[2] == plain[2] and fused[1].keys() == plain[1].keys()
    assert distance(fused[0], plain[0]) <= 1e-5
    assert all(distance(fused[1][name], g) <= 1e-5 for name, g in plain[1].items())


def test_in_bfloat16_a_fused_model_is_as_near_to_float32(folders: Callable[[str], str]) -> None:
    exact = run(folders("qwen3"))
    plain, fused = (run(folders("qwen3"), torch.bfloat16, fused) for fused in (False, True))
    assert distance(fused[0], exact[0]) <= 1.2 * distance(plain[0], exact[0])
    assert error(fused[1], exact[1]) <= 1.2 * error(plain[1], exact[1])


@pytest.mark.skipif(
    not (INTERPRET and backend_info()["triton"]["available"]),
    reason="Triton's interpreter is not on: see test_learner_cuda.py",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_kernels_themselves_give_the_unfused_models_gradients(
    folders: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OPS:
        monkeypatch.setattr(fused_body, name, partial(getattr(fused_body, name), backend="triton"))
    plain, fused = (run(folders("qwen3"), fused=fused) for fused in (False, True))
    assert distance(fused[0], plain[0]) <= 1e-5
    assert all(distance(fused[1][name], g) <= 1e-5 for name, g in plain[1].items())


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_a_sharded_model_is_fused_alike(
    checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (learner, critic):
        monkeypatch.setattr(module, "fuse_on", lambda device, lm, dtype: fuse(lm, dtype))
    folder, c = make_model("tied", tmp_path), config(checkpoint_activations=checkpointed)
    alone = one_step(folder, c, sequences(), None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", free_port())
    ranks = init_ranks(60)
    try:
        ranked = one_step(folder, c, sequences(), ranks)
    finally:
        ranks.close()
    assert error(ranked["gradient"], alone["gradient"]) < 1e-6
    assert error(ranked["weights"], alone["weights"]) < 1e-6


def test_what_cannot_be_fused_is_left_alone_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, available = torch.device("cuda"), {"triton": {"available": True}}
    monkeypatch.setattr(fused_body, "backend_info", lambda: available)

    def model(config: tr.PretrainedConfig) -> tr.PreTrainedModel:
        with torch.device("meta"):
            return tr.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]

    llama, bf16 = model(CONFIGS["llama"]), torch.bfloat16
    wide = model(tr.LlamaConfig(**SHAPE | {"hidden_size": 16384}))
    gemma = model(tr.Gemma3TextConfig(**SHAPE, head_dim=16))
    cases = [
        (gemma, bf16, "unfused, since gemma3_text is none of llama, mistral, qwen2, qwen3, qwen3_moe"),
        (llama, torch.float16, "unfused, since model.dtype is float16"),
        (wide, bf16, "unfused, since rows of 16384 or heads of 4096 are too wide"),
    ]
    for lm, dtype, line in cases:
        assert fuse_on(gpu, lm, dtype) == line
        assert not any("forward" in vars(module) for module in lm.modules())
    assert fuse_on(torch.device("cpu"), llama, bf16) == ""
    assert fuse_on(gpu, llama, bf16) == "fused RMSNorm, RoPE, SwiGLU"
    relu = model(tr.LlamaConfig(**SHAPE, hidden_act="relu"))
    assert fuse_on(gpu, relu, bf16) == "fused RMSNorm, RoPE"
    assert "forward" not in vars(relu.model.layers[0].mlp)
    available["triton"]["available"] = False
    assert fuse_on(gpu, llama, bf16) == "unfused, since Triton is missing"
