"""The keys of `engine.`: generators, sampling and forced interruption."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainer.config.values import NonNegativeInt, PositiveInt, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptionConfig:
    enabled: bool = False
    """Forced interruption: at a budget drawn per completion, stop, append the phrase, let the model answer."""
    lo: PositiveInt = 10_000
    """Least budget of thinking, in tokens."""
    hi: PositiveInt = 12_000
    """Greatest budget of thinking, in tokens."""
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    """Text appended at the budget; its tokens carry no loss."""
    end_marker: str = "</think>"
    """A completion that already holds this text is not interrupted. Empty: interrupt every completion that reaches its budget."""
    answer_tokens: PositiveInt = 2048
    """Tokens the model may still generate after the phrase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    kind: Literal["auto", "torch", "vllm"] = "auto"
    """Generator: the embedded torch engine, or vLLM (0.32.0; `make setup-vllm`, or `pip install '.[vllm]'` on GPUs). `auto`: vLLM for `urls`, and on GPUs where it is installed."""
    count: NonNegativeInt = 0
    """Engines side by side, each with its own copy of the model; 0: as many as the GPUs left by the learner hold, 1 on a CPU."""
    tensor_parallel: NonNegativeInt = 1
    """GPUs of one engine; more than 1 with vLLM only. 0: torch engines on the CPU, and the learner on the GPUs."""
    urls: tuple[str, ...] = ()
    """vLLM servers on other machines (started by `python -m trainer.engines.vllm_server`), instead of engines here; the shared secret is $SIGMOID_RL_SECRET."""
    colocate: bool = False
    """Learner and vLLM engines share the GPUs and sleep in turns: for few GPUs; slower than a split. On a single GPU always."""
    weight_push: Literal["auto", "file", "nccl", "ipc"] = "auto"
    """Route of new weights to the engines: `nccl` between distinct GPUs, `ipc` on the same ones, else a `file` in shared memory, uploaded to `urls`. `auto` chooses by the devices; with LoRA a `file` on the same GPUs, too. A `file` for engines here holds adapters alone; all else is whole weights. Give `file` where the others fail; `nccl` to servers in `urls` must be given to them as well."""
    memory: Annotated[float, Range(above=0, most=1)] = 0.9
    """Share of a GPU's memory that vLLM takes for weights and KV cache."""
    slots: PositiveInt = 64
    """Sequences generated at once by an engine; further requests queue. Not set for vLLM on GPUs: as many as its KV cache holds while lengths are spread evenly up to the longest. Not set for the torch engine on a GPU: fewer where its memory asks for it."""
    max_new_tokens: PositiveInt = 512
    """Longest completion, in tokens. Not used with interruption on: the limit is then budget + phrase + answer_tokens."""
    temperature: Annotated[float, Range(above=0, reason="RL needs samples, not the argmax")] = 1.0
    """Sampling temperature, in training and evaluation; top-p and top-k stay off, since they bias the ratio."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion: any token containing one stops it (and is kept as the last token). EOS always stops."""
    threads: NonNegativeInt = 0
    """CPU threads of the engine; 0: all the run's cores, shared with the learner in time."""
    interruption: InterruptionConfig = field(default_factory=InterruptionConfig)

    @property
    def direct_push(self) -> bool:
        """True if the learner sends its weights to the engines from GPU to GPU, without a file."""
        return self.weight_push in ("nccl", "ipc")

    def longest_completion(self, phrase_tokens: int | None = None) -> int:
        """Tokens of the longest completion: of all its parts where it can be interrupted, else max_new_tokens.

        Where the phrase is not tokenised yet, its length in bytes stands for its tokens: there cannot be more.
        """
        interruption = self.interruption
        if not interruption.enabled:
            return self.max_new_tokens
        phrase = len(interruption.phrase.encode()) if phrase_tokens is None else phrase_tokens
        return interruption.hi + phrase + interruption.answer_tokens
