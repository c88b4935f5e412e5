"""Cost of the LM head's loss in a run, by implementation: a factor on the compute axis of the curve.

A training step consists of the body (6 FLOP per active parameter and token, and attention) and the head (6HV
per token with loss, at the rate of each implementation). If a head makes a step cheaper by a factor f, a run
with it reaches at C the reward that a curve measured with the other head shows at C/f. docs/gpu-hours.md
explains the calculation and what it leaves out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a transformer; `ffn` is the width used per token (for an MoE: shared + routed expert)."""

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
    """Rate at which the loss of an LM head runs: 6NHV over its time."""

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
class Setting:
    """The size of a training step, and the machine."""

    peak_tflops: float
    body_mfu: float
    batch: float  # completions per step
    length: float  # tokens per completion, prompt included
    prompt: float  # tokens without loss
    generators: float  # GPUs
    trainers: float  # GPUs

    def body_gpu_hours(self, shape: Shape) -> float:
        """GPU-hours of the body of the model in one training step."""
        flops = self.batch * self.length * shape.body_flops(int(self.length))
        return flops / (self.body_mfu * self.peak_tflops * 1e12) / 3600

    def head_gpu_hours(self, shape: Shape, head: Head) -> float:
        """GPU-hours of the LM head and its loss in one training step."""
        flops = self.batch * (self.length - self.prompt) * shape.head_flops
        return flops / (head.tflops * 1e12) / 3600


def cost_factor(shape: Shape, setting: Setting, head: Head, reference: Head) -> float:
    """GPU-hours of a step with `head`, relative to the `reference` with which the curve was measured.

    The GPUs are split so that generation and training are balanced with the reference, and again with `head`.
    The work of generation per step does not depend on the head.
    """
    body = setting.body_gpu_hours(shape)
    balanced = body + setting.head_gpu_hours(shape, reference)
    generate = balanced * setting.generators / setting.trainers
    return (generate + body + setting.head_gpu_hours(shape, head)) / (generate + balanced)
