"""The constants of bench.gpu_hours, each with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer's sizes; `ffn` is what one token passes through (for an MoE: shared + routed expert)."""

    name: str
    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    source: str

    @property
    def body_parameters(self) -> int:
        """Active parameters without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    def body_flops(self, length: int) -> float:
        """Forward + backward, per token of sequences `length` long: 6 per parameter, and causal attention
        (2 GEMMs × 2 FLOP × 3 passes × mean context length/2)."""
        attention = self.layers * 12 * (length / 2) * self.q_heads * self.head_dim
        return 6 * self.body_parameters + attention

    @property
    def head_flops(self) -> float:
        """Forward + backward of the LM head, per token with loss: 6HV."""
        return 6 * self.hidden * self.vocab


MODELS = {
    "0.6b": Shape("0.6B", 1024, 28, 16, 8, 128, 3072, 151936, "Qwen/Qwen3-0.6B config.json"),
    "4b": Shape("4B", 2560, 36, 32, 8, 128, 9728, 151936, "Qwen/Qwen3-4B config.json"),
    "8b": Shape(
        "8B dense", 4096, 36, 32, 8, 128, 12288, 151936,
        "Qwen/Qwen3-8B config.json, for the paper's 8B dense model, whose sizes are not printed",
    ),
    "scout": Shape(
        "Scout-like MoE 17B×16", 5120, 48, 40, 8, 128, 16384, 202048,
        "meta-llama/Llama-4-Scout-17B-16E config.json: shared + one routed expert of 8192, every layer",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """How fast an LM head's loss runs: 6NHV over its time, whatever it computes."""

    name: str
    tflops: float
    source: str


PUBLISHED_HEADS = (
    Head(
        "naive FP32", 55.6,
        "BOUND, NOT MEASURED: FP32 without tensor cores on an H200, 6NHV in 1.1 s at N=16384 H=4096 V=151936",
    ),
    Head(
        "best peer", 540.0,
        "PUBLISHED, on an H100: Cut-Cross-Entropy, the fastest that keeps FP32 logits, about 540 effective",
    ),
    Head(
        "ours", 700.0,
        "TARGET, NOT MEASURED: the bar for an H200, .90 of the bare GEMMs, which sustain 790 there",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Constant:
    """A default and its source."""

    value: float
    unit: str
    source: str


CONSTANTS = {
    "peak_tflops": Constant(989, "TF/s", "NVIDIA H200 SXM datasheet: dense bf16"),
    "body_mfu": Constant(
        0.40, "of peak",
        "ASSUMED for a tuned trainer; published for whole trainers: .15 (prime-rl, 4B, 16K, 8×H200) to .27",
    ),
    "batch": Constant(768, "completions per step", "arXiv 2510.13786: 48 prompts × 16"),
    "length": Constant(
        16384, "tokens per completion", "arXiv 2510.13786: 12,288 + 2,048 + 2,048 of prompt, all full"
    ),
    "prompt": Constant(2048, "tokens without loss", "arXiv 2510.13786"),
    "generators": Constant(64, "GPUs", "arXiv 2510.13786: 64 of 80 GB200 generate"),
    "trainers": Constant(16, "GPUs", "arXiv 2510.13786: 16 of 80 GB200 train"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted curve of the paper; R0 is not in it."""

    A: float
    B: float
    C_mid: float
    source: str


R0 = Constant(0.30, "pass rate", "ASSUMED: the paper does not print R0")
CURVES = {
    "8b": Curve(0.610, 1.92, 2542, "arXiv 2510.13786 Table 1, ScaleRL (8B dense)"),
    "scout": Curve(0.710, 1.65, 4242, "arXiv 2510.13786 Table 1, ScaleRL-Scout"),
}


@dataclass(frozen=True, slots=True)
class PublishedFit:
    """The law of one of the paper's runs, as printed: ceiling, efficiency, GPU-hours of half the rise."""

    name: str
    C_mid: float
    B: float
    A: float


# arXiv 2510.13786, Table 1. R0 is not printed, nor are the points.
TABLE_1 = (
    PublishedFit("ScaleRL", 2542, 1.92, 0.610),
    PublishedFit("ScaleRL-32k", 11272, 1.89, 0.645),
    PublishedFit("ScaleRL-8gen", 2542, 2.44, 0.585),
    PublishedFit("ScaleRL-24gen", 3054, 2.22, 0.590),
    PublishedFit("ScaleRL-32gen", 2936, 2.07, 0.595),
    PublishedFit("ScaleRL-Scout", 4242, 1.65, 0.710),
    PublishedFit("ScaleRL-bs512", 2818, 1.77, 0.605),
    PublishedFit("ScaleRL-bs2048", 10909, 1.70, 0.645),
    PublishedFit("ScaleRL-math+code-math", 2896, 2.05, 0.595),
    PublishedFit("ScaleRL-math+code-code", 1675, 1.09, 0.615),
)


@dataclass(frozen=True, slots=True)
class PublishedRange:
    """What the paper's fit of its long run found over a range of GPU-hours."""

    low: float
    high: float
    law: str
    A: float
    B: float | None
    source: str


RANGES = (
    PublishedRange(1500, 50000, "sigmoid", 0.645, 1.70, "arXiv 2510.13786 A.7"),
    PublishedRange(0, 100000, "sigmoid", 0.655, 1.56, "arXiv 2510.13786 A.7"),
    PublishedRange(0, 50000, "sigmoid", 0.645, 1.70, "arXiv 2510.13786 A.7"),
    PublishedRange(5000, 50000, "sigmoid", 0.645, 1.67, "arXiv 2510.13786 A.7"),
    PublishedRange(1500, 50000, "power law", 1.00, None, "arXiv 2510.13786 A.4"),
    PublishedRange(5000, 50000, "power law", 0.74, None, "arXiv 2510.13786 A.4"),
)
