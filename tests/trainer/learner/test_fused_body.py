"""The promise of the fused body: a model computes what it does without, and keeps its parameters' names."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from test_ranks import lone_rank, one_step
from torch import Tensor
from training import MODELS, SHAPE, config, error, make_model, sequences

from kernels import backend_info
from kernels.triton.config import INTERPRET
from trainer.config import ConfigError
from trainer.learner import critic, fused_body, learner
from trainer.learner.attention import layout, packed_attention
from trainer.learner.fused_body import fuse, fuse_on
from trainer.learner.inputs import make_inputs
from trainer.learner.packing import MicroBatch, pack
from trainer.learner.policy_model import hidden_states, load, prepare

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
ONE_LAYER = {"qwen3 of one layer": tr.Qwen3Config(**SHAPE | {"num_hidden_layers": 1}, head_dim=16)}
OPS = ("rms_norm", "fused_add_rms_norm", "fused_qk_norm_rope", "swiglu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A folder with a model of each family, all of whose weights are random, the norms' too."""

    def made(family: str) -> str:
        folder = tmp_path_factory.getbasetemp() / f"fused-{family}"
        if not folder.exists():
            torch.manual_seed(3)
            lm = tr.AutoModelForCausalLM.from_config((CONFIGS | ONE_LAYER)[family])
            for p in lm.parameters():
                p.data.normal_(0, 0.2) if p.dim() > 1 else p.data.add_(torch.randn_like(p), alpha=0.3)
            lm.save_pretrained(folder)
        return str(folder)

    return made


def micro_batch() -> MicroBatch:
    (m,) = pack(sequences(), 10_000)
    return m


def states(lm: tr.PreTrainedModel, dtype: torch.dtype) -> Tensor:
    """Hidden states of the micro-batch's loss tokens."""
    return hidden_states(lm.base_model, make_inputs(micro_batch(), dtype, lm.device), dtype)


def run(
    folder: str,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    checkpointed: bool = False,
    match_engine: bool = False,
) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """Logits, gradients by name, and the names in the state dict."""
    lm = load(folder)
    prepare(lm, checkpointed)
    if fused:
        assert fuse(lm, dtype, match_engine)
    hidden = states(lm, dtype).to(dtype).float()
    logits = hidden @ lm.get_output_embeddings().weight.to(dtype).float().T  # as PolicyModel rounds them
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
    norms = (1 + checkpointed, 4 + 3 * checkpointed)  # the first layer's norm has nothing to add
    assert calls == dict(zip(OPS, (*norms, layers, gated), strict=True))
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
def test_a_sharded_model_fuses(checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (learner, critic):
        monkeypatch.setattr(module, "fuse_on", lambda device, lm, dtype, matched: fuse(lm, dtype))
    folder, c = make_model("tied", tmp_path), config(checkpoint_activations=checkpointed)
    alone = one_step(folder, c, sequences(), None)
    with lone_rank(monkeypatch) as ranks:
        ranked = one_step(folder, c, sequences(), ranks)
    assert error(ranked["gradient"], alone["gradient"]) < 1e-6
    assert error(ranked["weights"], alone["weights"]) < 1e-6


CPU, GPU, FP32, BF16 = torch.device("cpu"), torch.device("cuda"), torch.float32, torch.bfloat16
FUSED = "fused RMSNorm, RoPE, SwiGLU"
GEMMA = tr.Gemma3TextConfig(**SHAPE, head_dim=16)
LINES: list[tuple[torch.device, tr.PretrainedConfig, torch.dtype, bool | None, str]] = [
    (GPU, GEMMA, BF16, False, f"unfused, since gemma3_text is none of {', '.join(fused_body.FAMILIES)}"),
    (GPU, CONFIGS["llama"], torch.float16, False, "unfused, since model.dtype is float16"),
    (GPU, tr.LlamaConfig(**SHAPE | {"hidden_size": 16384}), BF16, False,
     "unfused, since rows of 16384 or heads of 4096 are too wide"),
    (CPU, CONFIGS["llama"], BF16, False, ""),
    (CPU, CONFIGS["llama"], BF16, None, ""),
    (GPU, tr.LlamaConfig(**SHAPE, hidden_act="relu"), BF16, False, "fused RMSNorm, RoPE"),
    (GPU, CONFIGS["llama"], BF16, False, FUSED),
    (GPU, CONFIGS["llama"], FP32, None, FUSED),
    *((device, CONFIGS["llama"], BF16, True, f"{FUSED}; residual stream in bf16, as the engine's")
      for device in (CPU, GPU)),
    (GPU, CONFIGS["llama"], BF16, None, f"{FUSED}; residual stream in bf16, as the engine's"),
]  # fmt: skip


def test_what_is_fused_is_said_and_what_cannot_be_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    available = {"triton": {"available": True}}
    monkeypatch.setattr(fused_body, "backend_info", lambda: available)

    def model(config: tr.PretrainedConfig) -> tr.PreTrainedModel:
        with torch.device("meta"):
            return tr.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]  # transformers leaves it untyped

    for device, family, dtype, match_engine, line in LINES:
        lm = model(family)
        assert fuse_on(device, lm, dtype, match_engine) == line
        assert ("forward" in vars(lm.model.layers[0].mlp)) == ("SwiGLU" in line)
        assert any("forward" in vars(m) for m in lm.modules()) == line.startswith("fused")
        assert any(m._forward_hooks for m in lm.modules()) == ("as the engine" in line)
    for family, dtype, why in (
        (CONFIGS["llama"], FP32, "model.dtype is float32, in which"),
        (GEMMA, BF16, "gemma3_text is none"),
    ):
        with pytest.raises(ConfigError, match=f"model.match_engine cannot be true: {why}.*leave it out"):
            fuse_on(CPU, model(family), dtype, True)
    available["triton"]["available"] = False
    assert fuse_on(GPU, model(CONFIGS["llama"]), BF16, False) == "unfused, since Triton is missing"


def rounded_rms_norm(x: Tensor, norm: Any, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """vLLM's RMSNorm.forward_native: the sum, its norm and its product with the weight, in bf16."""
    stream, total = x, x.float()
    if residual is not None:
        total = total + residual.float()
        stream = total.to(x.dtype)
    scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled.to(x.dtype) * norm.weight, stream


def before_attention(layer: Any, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
    """vLLM's graph of a layer up to its attention: queries, keys, values (T, heads, D), the stream."""
    normed, residual = rounded_rms_norm(x, layer.input_layernorm, residual)
    attention = layer.self_attn
    q, k, v = (
        projection(normed).view(len(x), -1, attention.head_dim)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q, k = rounded_rms_norm(q, attention.q_norm)[0], rounded_rms_norm(k, attention.k_norm)[0]
    rotated = []
    for y in (q, k):
        a, b = y.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        rotated.append(torch.cat([a * c - b * s, b * c + a * s], -1))
    return *rotated, v, residual


def after_attention(layer: Any, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's graph of the rest of the layer."""
    x = layer.self_attn.o_proj(attended)
    x, residual = rounded_rms_norm(x, layer.post_attention_layernorm, residual)
    gate, up = layer.mlp.gate_proj(x), layer.mlp.up_proj(x)
    return layer.mlp.down_proj(torch.nn.functional.silu(gate) * up), residual


@torch.no_grad()
def engine_logits(folder: str) -> Tensor:
    """What vLLM computes of the model in bf16, FP32 logits; compiled, as it is on GPUs, by Inductor."""
    steps = (before_attention, after_attention, rounded_rms_norm)
    before, after, last = (torch.compile(step, dynamic=False) for step in steps)
    lm = tr.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    body, m = lm.model, micro_batch()
    x, residual, packed = body.embed_tokens(torch.from_numpy(m.input_ids)), None, layout(m.segments)
    tables = body.rotary_emb(x[None], torch.from_numpy(m.position_ids)[None])
    cos, sin = (table[0].chunk(2, -1)[0].contiguous() for table in tables)
    for layer in body.layers:
        *qkv, residual = before(layer, x, residual, cos, sin)
        q, k, v = (y.transpose(0, 1)[None] for y in qkv)
        out, _ = packed_attention(layer, q, k, v, None, layer.self_attn.scaling, packed=packed)
        x, residual = after(layer, out[0].flatten(1), residual)
    hidden = last(x, body.norm, residual)[0].index_select(0, torch.from_numpy(m.rows))
    return hidden.float() @ lm.get_output_embeddings().weight.float().T


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="Inductor compiles C++"
)
@pytest.mark.slow
@pytest.mark.parametrize("family", [*ONE_LAYER, "qwen2", "qwen3"])
def test_matched_log_probs_are_a_compiled_bf16_engines(family: str, folders: Callable[[str], str]) -> None:
    """Mean |learner − engine| in nats: with match_engine below a tenth of that without."""
    folder, exact = folders(family), run(folders(family))
    engine = engine_logits(folder).log_softmax(-1)
    gaps, cosines = [], []
    for matched in (False, True):
        logits, gradients, _ = run(folder, torch.bfloat16, True, match_engine=matched)
        gaps.append(float((logits.log_softmax(-1) - engine).abs().mean()))
        ours, theirs = (torch.cat([g[n].flatten() for n in exact[1]]).double() for g in (gradients, exact[1]))
        cosines.append(float(torch.nn.functional.cosine_similarity(ours, theirs, 0)))
        assert all(g.dtype == torch.float32 for g in gradients.values())
    assert gaps[1] < 0.1 * gaps[0]
    assert min(cosines) > 0.999


def test_weights_and_master_gradients_of_a_matched_model_stay_fp32(folders: Callable[[str], str]) -> None:
    lm = load(folders("qwen3"))
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    fuse(lm, torch.bfloat16, match_engine=True)
    streams: list[torch.dtype] = []
    lm.model.layers[1].register_forward_hook(lambda module, args, out: streams.extend(x.dtype for x in out))
    states(lm, torch.bfloat16).float().sum().backward()
    assert streams == [torch.bfloat16] * 2
    for name, p in lm.named_parameters():
        assert torch.equal(p, before[name]) and (p.grad is None or p.grad.dtype == torch.float32)
