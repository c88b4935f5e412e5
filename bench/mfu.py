"""What share of a card's peak the learner would reach (MFU), by an account of its operations.

    python -m bench.mfu

No GPU is needed, and no card has confirmed it: the rates, those of `bench.kernels.account` and `FLASH`, are
assumptions. What is counted is real: the learner's own model runs forward and backward over a micro-batch of
fake tensors (shapes and types without numbers), and every operation that it asks torch for is added up: a
matrix product by its FLOPs, anything else by the bytes that it reads and writes. Fused ops and flash
attention are one kernel each. Kernels follow one another; the host keeps up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from bench.kernels.account import CARDS, HIDDEN, Card, bare, extra
from bench.learner.step import MODELS
from trainer.accounting.throughput import PEAK_TFLOPS, throughput
from trainer.learner import attention, fused_body, policy_model
from trainer.learner.inputs import Inputs

TOKENS = 16_384  # of a micro-batch
MEAN_KEYS = 2048  # that a token attends to: sequences of 4,096 tokens
MICRO_BATCHES = 16  # of an optimizer step
ADAMW_BYTES = 28  # of a parameter: it, its gradient and two moments are read, all but the gradient written
FLASH = {"FlashAttention 3": (550e12, 420e12), "torch's varlen": (330e12, 260e12)}
"""FLOP/s, forward and backward, of a causal kernel on Hopper at heads of 128: near their makers' figures."""
VARIANTS = {"unfused, FP32 stream": None, "fused, FP32 stream": False, "fused, match_engine": True}
NO_KERNEL = {
    "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like", "expand", "lift_fresh",
    "permute", "select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
WRITE_ONLY = (
    "embedding",
    "new_zeros",
    "zeros",
    "zeros_like",
)  # or they read rows of a table, as many as they write
PRODUCTS = ("mm", "addmm", "bmm")


@dataclass(slots=True)
class Cost:
    """What some operations take, and how many kernels they are."""

    product_flops: float = 0.0
    product_bytes: float = 0.0
    bytes: float = 0.0  # of everything else
    attention_flops: list[float] = field(default_factory=lambda: [0.0, 0.0])  # forward, backward
    kernels: int = 0

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        """This cost and `times` another one."""
        pairs = zip(self.attention_flops, other.attention_flops, strict=True)
        return Cost(
            self.product_flops + times * other.product_flops,
            self.product_bytes + times * other.product_bytes,
            self.bytes + times * other.bytes, [a + times * b for a, b in pairs],
            self.kernels + round(times * other.kernels),
        )  # fmt: skip

    def seconds(self, card: Card, flash: str) -> dict[str, float]:
        """By what takes them."""
        rates = zip(self.attention_flops, FLASH[flash], strict=True)
        return {
            "matrix products": self.product_flops / card.gemm
            + (1 - HIDDEN) * self.product_bytes / card.bandwidth,
            "attention": sum(flops / rate for flops, rate in rates),
            "everything else": self.bytes / card.bandwidth,
            "launches": self.kernels * card.launch,
        }


def size(tensors: Any) -> int:
    """Bytes of the distinct tensors in nested sequences; of an expanded one, those that it has in memory."""
    flat = [x for x in _pytree.tree_leaves(tensors) if isinstance(x, Tensor)]
    return sum(
        x.element_size() * int(np.prod([n for n, s in zip(x.shape, x.stride(), strict=True) if s]))
        for x in {id(x): x for x in flat}.values()
    )


class Counter(TorchDispatchMode):
    """Adds up the cost of every operation, unless it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.cost, self.paused = Cost(), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not self.paused and name not in NO_KERNEL:
            self.add(name, args, out)
        return out

    def add(self, name: str, inputs: Any, outputs: Any) -> None:
        """Count one kernel."""
        self.cost.kernels += 1
        moved = size(outputs) * (1 + (name == "embedding")) + (0 if name in WRITE_ONLY else size(inputs))
        if name in PRODUCTS:
            (*batch, rows, inner), columns = inputs[-2].shape, inputs[-1].shape[-1]
            self.cost.product_flops += 2.0 * int(np.prod(batch)) * rows * inner * columns
            self.cost.product_bytes += moved
        else:
            self.cost.bytes += moved

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """What happens inside is not counted."""
        before, self.paused = self.paused, True
        yield
        self.paused = before


def as_one_kernel(
    counter: Counter, op: Callable[..., Any], saved: Sequence[int], **more: Any
) -> Callable[..., Any]:
    """A fused op that costs what its kernel does: forward its arguments and results; backward what it keeps
    (by places among arguments, then results), the gradients it gets and those it returns."""

    class OneKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with counter.one_kernel():
                out = op(*args, **more)
            results = out if isinstance(out, tuple) else (out,)
            counter.add("fused", args, results)
            ctx.kept = [size((*args, *results)[i]) for i in saved]
            ctx.shapes = [
                (x.shape, x.dtype) if isinstance(x, Tensor) and x.requires_grad else None for x in args
            ]
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with counter.one_kernel():
                out = [s and torch.empty(s[0], dtype=s[1]) for s in ctx.shapes]
            counter.add("fused", gradients, out)
            counter.cost.bytes += sum(ctx.kept)
            return tuple(out)

    return OneKernel.apply


def replacements(counter: Counter) -> dict[tuple[Any, str], Any]:
    """What stands in for the ops that are one kernel each: by module and name."""

    def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        return as_one_kernel(counter, lambda x, w: torch.empty(x.shape, dtype=dtype), (0, 1))(x, weight)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Any:
        def op(x: Tensor, r: Tensor, w: Tensor) -> Any:
            return torch.empty(x.shape, dtype=dtype), torch.empty_like(r)

        return as_one_kernel(counter, op, (2, 4))(x, residual, weight)

    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype,
        q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
    ) -> Any:  # fmt: skip
        def op(x: Tensor, *rest: Any) -> Any:
            return torch.empty(x.shape, dtype=dtype)

        kept = (0, 1, 2) if q_weight is not None else (1, 2)
        inputs = (q, cos, sin, q_weight), (k, cos, sin, k_weight)
        return tuple(as_one_kernel(counter, op, kept)(*x) for x in inputs)

    def swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Any:
        return as_one_kernel(counter, lambda g, u: torch.empty(g.shape, dtype=dtype), (0, 1))(gate, up)

    class Flash(torch.autograd.Function):
        """Attention; keys and values are gathered before, and their gradients summed after."""

        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            counter.cost.attention_flops[0] += 4.0 * q.numel() * MEAN_KEYS
            counter.cost.bytes += 2 * size((k, v))
            counter.cost.kernels += 3
            with counter.one_kernel():
                return torch.empty_like(q)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            q, k, v = ctx.saved_tensors
            counter.cost.attention_flops[1] += 10.0 * q.numel() * MEAN_KEYS
            # In FP32: the gradient is widened, zeros are written, summed into, and rounded.
            counter.cost.bytes += (6 + 4 + 12 + 6) * (k.numel() + v.numel())
            counter.cost.kernels += 9
            with counter.one_kernel():
                return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def flash(q: Tensor, k: Tensor, v: Tensor, packed: Any, scaling: float) -> Any:
        return Flash.apply(q, k, v)

    return {
        (fused_body, "rms_norm"): norm, (fused_body, "fused_add_rms_norm"): add_norm,
        (fused_body, "fused_qk_norm_rope"): rope, (fused_body, "swiglu"): swiglu,
        (attention, "_attention"): flash,
    }  # fmt: skip


def count(model: str, match_engine: bool | None, checkpointed: bool, layers: int) -> Cost:
    """The cost of the body's forward and backward over one micro-batch that is not a step's first."""
    config = MODELS[model]()
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    config._attn_implementation = "packed"
    with FakeTensorMode():
        lm = AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=torch.float32)
        policy_model.prepare(lm, checkpointed)
        if match_engine is not None:
            fused_body.fuse(lm, torch.bfloat16, match_engine)
        rows = torch.arange(TOKENS)
        inputs = Inputs(rows, rows, rows, mock.Mock(max_keys=TOKENS), {})
        for p in lm.model.parameters():
            p.grad = torch.empty_like(p)  # of the micro-batches before
        counter = Counter()
        with ExitStack() as stack:
            for (module, name), new in replacements(counter).items():
                stack.enter_context(mock.patch.object(module, name, new))
            stack.enter_context(counter)
            hidden = policy_model.hidden_states(lm.base_model, inputs, torch.bfloat16).to(torch.bfloat16)
            hidden.backward(torch.empty_like(hidden))
    return counter.cost


@cache
def of_model(model: str, variant: str, checkpointed: bool) -> tuple[Cost, int]:
    """The cost of the whole body, and the number of the model's parameters."""
    one, two = (count(model, VARIANTS[variant], checkpointed, layers) for layers in (1, 2))
    config = MODELS[model]()
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return one.plus(two.plus(one, -1), config.num_hidden_layers - 1), parameters


def step_seconds(model: str, card: Card, variant: str, checkpointed: bool, flash: str) -> dict[str, float]:
    """Seconds of a micro-batch, with its share of AdamW's, by what takes them."""
    cost, parameters = of_model(model, variant, checkpointed)
    config = MODELS[model]()
    head = TOKENS, config.hidden_size, config.vocab_size
    return cost.seconds(card, flash) | {
        "loss": bare(card, *head) + sum(extra(card, *head, "two-pass").values()),
        "AdamW": ADAMW_BYTES * parameters / MICRO_BATCHES / card.bandwidth,
    }


def mfu(model: str, card: Card, variant: str, checkpointed: bool, flash: str) -> float:
    """As the learner reports it: 6 FLOPs a parameter and token, over the data sheet's peak."""
    seconds = sum(step_seconds(model, card, variant, checkpointed, flash).values())
    parameters = of_model(model, variant, checkpointed)[1]
    return throughput(parameters, TOKENS, seconds, 1, PEAK_TFLOPS[card.name])["learner/mfu"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of MFU, and where the time goes without recomputation."""
    kernels = [(variant, "torch's varlen") for variant in VARIANTS]
    kernels.append(("fused, match_engine", "FlashAttention 3"))
    print("| model | card | recomputed |", *(f"{variant}; {flash} |" for variant, flash in kernels))
    print("|---|---|---|" + "---|" * len(kernels))
    for model in ("qwen3-0.6b", "qwen3-4b"):
        for card in CARDS:
            for checkpointed in (False, True):
                row = (
                    f"{mfu(model, card, variant, checkpointed, flash):.2f} |" for variant, flash in kernels
                )
                print(f"| {model} | {card.name} | {'layers' if checkpointed else '–'} |", *row)
    for model in ("qwen3-0.6b", "qwen3-4b"):
        for variant, flash in (kernels[0], kernels[-1]):
            parts = step_seconds(model, CARDS[1], variant, False, flash).items()
            text = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in parts)
            print(f"\n{model}, {CARDS[1].name}, {variant}, {flash}, ms a micro-batch: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
