"""One optimizer step by our learner and by a plain transformers loop, for `python -m bench learner`.

Models are built from their configs with random weights, and batches from random tokens with the lengths of a
real batch, so nothing is downloaded. All sizes are in one `StepProblem`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from bench.measure import milliseconds
from kernels import native
from trainer.accounting import kernel_cost
from trainer.accounting.kernel_cost import Shape
from trainer.config import Config, LearnerConfig, LoraConfig, ModelConfig, ObjectiveConfig, PipelineConfig
from trainer.learner.learner import Learner
from trainer.learner.packing import pack
from trainer.telemetry import Clock
from trainer.types import TrainBatch, TrainSequence


def _qwen3(shape: Shape) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
    )  # fmt: skip


MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "tiny": lambda: LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "qwen3-0.6b": partial(_qwen3, kernel_cost.MODELS["0.6b"]),
    "qwen3-4b": partial(_qwen3, kernel_cost.MODELS["4b"]),
}  # fmt: skip
MAX_RATIO, LR, GRAD_CLIP = 4.0, 1e-5, 1.0
GEMM_NUMBERS = 1 << 26  # of the largest operand whose product is timed


@dataclass(frozen=True, slots=True)
class StepProblem:
    """Model, batch and micro-batches. Completion lengths are the quantiles of a truncated log-normal."""

    model: str
    device: str
    dtype: str  # of body and logits' operands; master weights are FP32
    prompts: int
    group: int  # completions of a prompt
    prompt_tokens: int  # of the middle prompt; lengths are uniform from 0.5 to 1.5 of it
    median: int  # tokens of the middle completion
    sigma: float  # standard deviation of log(length); 0: all the same length
    longest: int
    micro_batch_tokens: int  # ours
    micro_batch_sequences: int  # the plain loop's
    checkpoint: bool  # recompute activations, both sides


TINY = StepProblem("tiny", "cpu", "float32", 2, 4, 8, 12, 0.8, 40, 64, 2, False)
SMALL = StepProblem("smollm2-135m", "cpu", "float32", 4, 8, 128, 256, 0.8, 2048, 2048, 4, False)
PACKS = StepProblem("qwen3-0.6b", "cuda", "bfloat16", 4, 8, 256, 1400, 0.7, 3840, 16_384, 2, False)
BATCHES = {  # of `python -m bench learner`
    "tiny": TINY,
    "small": SMALL,
    "packs": PACKS,
    "long": replace(PACKS, prompts=1, group=1, median=15_872, sigma=0.0, longest=15_872),
}


def make_batch(p: StepProblem) -> list[TrainSequence]:
    """The batch: random tokens, log-probs near those of random weights, weights that sum to 1."""
    rng = np.random.default_rng(0)
    vocabulary = MODELS[p.model]().vocab_size
    quantiles = (np.arange(p.prompts * p.group) + 0.5) / (p.prompts * p.group)  # the same for every seed
    spread = np.exp(p.sigma * rng.permutation([NormalDist().inv_cdf(x) for x in quantiles]))
    lengths = np.clip(np.rint(p.median * spread), 2, p.longest).astype(int).reshape(p.prompts, p.group)
    weight = np.float32(1 / lengths.sum())
    batch = []
    for row in lengths:
        size = int(p.prompt_tokens * rng.uniform(0.5, 1.5)) + 1
        prompt = rng.integers(0, vocabulary, size).astype(np.int32)
        for n in row:
            batch.append(
                TrainSequence(
                    prompt, rng.integers(0, vocabulary, n).astype(np.int32),
                    rng.normal(-np.log(vocabulary), 0.1, n).astype(np.float32), np.zeros(n, np.int32),
                    np.full(n, weight), np.full(n, rng.normal(), np.float32),
                )
            )  # fmt: skip
    return batch


def lengths(batch: Sequence[TrainSequence], p: StepProblem) -> dict[str, int]:
    """Counts of a batch's tokens.

    useful: each completion's tokens, and each prompt's once. fed_ours: rows of the packed micro-batches;
    fed_plain: of the padded ones. pairs: (query, key) pairs of our attention.
    """
    packs = pack(batch, p.micro_batch_tokens)
    prompts = {s.prompt_ids.tobytes(): len(s.prompt_ids) for s in batch}
    total = [len(s.prompt_ids) + len(s.token_ids) for s in batch]
    n = p.micro_batch_sequences
    padded = [total[i : i + n] for i in range(0, len(total), n)]
    completion_tokens = sum(len(s.token_ids) for s in batch)
    return {
        "completions": len(batch),
        "longest": max(total),
        "useful": sum(prompts.values()) + completion_tokens,
        "fed_ours": sum(len(m.input_ids) for m in packs),
        "fed_plain": sum(max(sizes) * len(sizes) for sizes in padded),
        "loss": completion_tokens,
        "pairs": sum(int((m.position_ids + 1).sum()) for m in packs),  # with a row's ancestors and itself
        "micro_batches": len(packs),
    }


def flops(p: StepProblem, counted: dict[str, int]) -> dict[str, float]:
    """FLOPs of our step: 6 per token and parameter (the head's on loss tokens only), and attention's."""
    config = MODELS[p.model]()
    head, body = (sum(w.numel() for w in weights) for weights in linear_weights(p.model))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head_dim
    return {
        "matmul": 6.0 * (body * counted["fed_ours"] + head * counted["loss"]),
        "attention": 12.0 * width * config.num_hidden_layers * counted["pairs"],
    }


def linear_weights(model: str) -> tuple[list[Tensor], list[Tensor]]:
    """The weight of the head, and those of the body's linear layers, without their memory."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(MODELS[model]())
    head = lm.get_output_embeddings()
    return [head.weight], [m.weight for m in lm.modules() if isinstance(m, nn.Linear) and m is not head]


def save_model(p: StepProblem, folder: str) -> None:
    """Save random weights for a learner in a folder, in the problem's dtype."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    with torch.device(p.device):
        lm = AutoModelForCausalLM.from_config(MODELS[p.model](), dtype=getattr(torch, p.dtype))
    lm.save_pretrained(folder)
    del lm
    if p.device == "cuda":
        torch.cuda.empty_cache()  # its memory belongs to the measured processes


Step = Callable[[Sequence[TrainSequence]], float]  # one optimizer step; its loss


def ours(p: StepProblem, folder: str, rank: int = 0) -> Step:
    """trainer.learner.learner.Learner, as in a run; with LoRA of this rank."""
    dtype: Any = p.dtype  # checked by the parser
    config = Config(
        model=ModelConfig(path=folder, dtype=dtype, lora=LoraConfig(rank=rank)),
        objective=ObjectiveConfig(max_ratio=MAX_RATIO),
        pipeline=PipelineConfig(max_lag=10**6),  # the same batch at every version
        learner=LearnerConfig(
            lr=LR,
            grad_clip=GRAD_CLIP,
            micro_batch_tokens=p.micro_batch_tokens,
            checkpoint_activations=p.checkpoint,
        ),
    )
    learner = Learner(config, folder, Clock("learner", lambda spans: None))

    def step(batch: Sequence[TrainSequence]) -> float:
        return learner.train(TrainBatch(learner.version + 1, tuple(batch), {}))["learner/loss"]

    return step


def plain(p: StepProblem, folder: str) -> Step:
    """A simple step: padded micro-batches of a few sequences, whole logits, log_softmax, AdamW."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lm.to(p.device)  # type: ignore[arg-type]  # mypy loses `self` under transformers' decorator
    lm.train()
    if p.checkpoint:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    c = LearnerConfig()
    decay: dict[str, Any] = {"betas": c.betas, "eps": c.eps, "weight_decay": c.weight_decay}
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LR, fused=True, **decay)
    dtype = getattr(torch, p.dtype)

    def step(batch: Sequence[TrainSequence]) -> float:
        total = 0.0
        for i in range(0, len(batch), p.micro_batch_sequences):
            padded = _pad(batch[i : i + p.micro_batch_sequences], p.device)
            with torch.autocast(p.device, dtype, enabled=dtype != torch.float32):
                logits = lm(padded["ids"], attention_mask=padded["mask"], use_cache=False).logits
            logp = logits[:, :-1].float().log_softmax(-1)
            logp = logp.gather(-1, padded["ids"][:, 1:, None])[..., 0]
            ratio = (logp.detach() - padded["logprobs"]).exp().clamp(max=MAX_RATIO)
            loss = -(padded["weights"] * ratio * padded["advantages"] * logp).sum()
            del logits, logp, ratio
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(lm.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _pad(sequences: Sequence[TrainSequence], device: str) -> dict[str, Tensor]:
    """ids and mask (B, S), and per predicted token (B, S − 1) what the loss takes; padding to the right."""
    rows = defaultdict[str, list[Tensor]](list)
    for s in sequences:
        ids = np.concatenate([s.prompt_ids, s.token_ids])
        rows["ids"].append(torch.from_numpy(ids).long())
        rows["mask"].append(torch.ones(len(ids), dtype=torch.int64))
        of_tokens = {"logprobs": s.logprobs_gen, "weights": s.token_weights, "advantages": s.advantages}
        for name, values in of_tokens.items():
            rows[name].append(F.pad(torch.from_numpy(values), (len(s.prompt_ids) - 1, 0)))
    return {name: pad_sequence(row, batch_first=True).to(device) for name, row in rows.items()}


PROVIDERS: dict[str, Callable[[StepProblem, str], Step]] = {
    "ours": ours, "lora": partial(ours, rank=16), "plain": plain,
}  # fmt: skip


def best_gemm(p: StepProblem) -> dict[str, Any]:
    """The fastest matrix product of the model's own shapes: FLOP/s, which one, and all of them."""
    head, body = linear_weights(p.model)
    shapes = {tuple(w.shape) for w in (*head, *body)}
    dtype = getattr(torch, p.dtype)
    rates: dict[str, float] = {}
    for out, size in sorted(shapes):
        rows = min(p.micro_batch_tokens, GEMM_NUMBERS // max(out, size))  # the head's chunk is smaller
        operands = ((rows, size), (out, size), (rows, out))
        x, w, g = (torch.randn(shape, device=p.device, dtype=dtype) for shape in operands)
        calls: dict[str, Callable[[], object]] = {
            "X Wᵀ, torch": partial(torch.mm, x, w.t()),
            "G W, torch": partial(torch.mm, g, w),
            "Gᵀ X, torch": partial(torch.mm, g.t(), x),
        }
        if p.device == "cpu" and not native.why_not():
            calls["X Wᵀ, ours"] = partial(native.logits, x, w, torch.empty(rows, out))
        for name, call in calls.items():
            seconds = min(milliseconds(call, p.device) for _ in range(4)) / 1e3
            rates[f"{name}, {rows} × {size} × {out}"] = 2 * rows * size * out / seconds
    best = max(rates, key=lambda name: rates[name])
    return {"flops_per_s": rates[best], "product": best, "all": rates}
