"""The interface of a backend, and the choice of one: `cpu` (native C++), `triton` (CUDA), `torch` (any)."""

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from .rows import Gradient
from .settings import Settings
from .tokens import Tokens

MODULES = {"cpu": ".native", "triton": ".triton.backend", "torch": ".torch_backend"}
Score = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Backend(Protocol):
    """The work on one chunk of C rows. `kernels.rows` defines the statistics.

    targets (C,) are columns of this weight; one outside [0, V) belongs to another rank's shard of the
    vocabulary. cap is the logits' soft cap, 0 for none.
    """

    def prepare(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
        """The weight in the form that the other methods take, for logits of this dtype."""

    def logits(self, h: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (C, V) = h Wᵀ in FP32."""

    def row_stats(self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float) -> Tensor:
        """(4, C) statistics of the rows of z (C, V), which is not changed."""

    def row_grads(
        self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float, g: Gradient,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """The logits' gradient (C, V), in place of z; in this type where that is faster than FP32."""

    def d_hidden(self, dz: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (C, H) FP32 = dz W."""

    def add_d_weight(self, dz: Tensor, h: Tensor, out: Tensor, first: bool = False) -> None:
        """out (V, H) FP32 += dzᵀ h, or = if first: then nothing has been written to out."""

    @property
    def score(self) -> Score | None:
        """Statistics (4, N) of (h, weight, targets, inverse_temperature, cap) without (N, V) logits."""


class SinglePass(Backend, Protocol):
    """A backend that stores E = e^{u − anchor} in bf16, with Ê_y = −others, in one pass; see `chunk_loop`."""

    def single_pass(
        self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, logprobs_gen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Ê (C, V) in place of z, (4, C) statistics); the backend chooses the anchor."""

    def fused_epilogue(
        self, h: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, logprobs_gen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same, computed in the GEMM's epilogue: FP32 logits never reach memory."""

    @property
    def fused_score(self) -> Score:
        """`score` by the GEMM of `fused_epilogue`."""


class FusedTerms(Protocol):
    """A backend that computes an objective's terms in one launch; see `chunk_loop.StepOutputs`."""

    def has_terms(self, settings: Settings) -> bool:
        """True if it can for these settings."""

    def terms(
        self, stats: Tensor, t: Tokens, settings: Settings, values: list[Tensor]
    ) -> tuple[Gradient, Tensor]:
        """(the logits' gradient, sums of weight · term) of C rows, from (4, C) statistics.

        `values` are (C,) each, and are filled: log-prob, entropy, ratio, truncated, KL estimate.
        """


def choose(hidden: Tensor, weight: Tensor, name: str | None) -> tuple[str, Backend]:
    """The backend of this name, or the best one for these tensors. ValueError if it cannot handle them."""
    if name is not None and name not in MODULES:
        raise ValueError(f"backend is {name!r}; expected one of {', '.join(MODULES)}, or None")
    wanted = name or {"cpu": "cpu", "cuda": "triton"}.get(hidden.device.type, "torch")
    reason = _why_not(wanted, hidden, weight)
    if not reason:
        return wanted, _load(wanted)
    if name is not None:
        raise ValueError(f"backend {name!r} cannot be used: {reason}")
    if unavailable(wanted):
        notice(f"kernels: using the torch backend instead of {wanted!r}: {reason}")
    return "torch", _load("torch")


@contextmanager
def launching(hidden: Tensor) -> Iterator[None]:
    """Kernels inside run on hidden's device (Triton takes the current one), without autocast's rounding."""
    with torch.cuda.device_of(hidden), torch.autocast(hidden.device.type, enabled=False):
        yield


def capturing(x: Tensor) -> bool:
    """True if a CUDA graph is being captured, which forbids waiting for values of x."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def backend_info() -> dict[str, dict[str, Any]]:
    """State of each backend: if it works here, and what it uses (ISA, threads, versions) or why not."""
    info: dict[str, dict[str, Any]] = {}
    for name in MODULES:
        reason = unavailable(name)
        details = {"why_not": reason} if reason else _load(name).info()
        info[name] = {"available": not reason} | details
    return info


def _why_not(name: str, hidden: Tensor, weight: Tensor) -> str:
    """The reason why this backend cannot handle these tensors; empty if it can."""
    types = {hidden.dtype, weight.dtype} - {torch.float32, torch.bfloat16}
    if types and not (name == "torch" or (name == "triton" and types == {torch.float16})):
        expected = "FP32, BF16 or FP16" if name == "triton" else "FP32 or BF16"
        return f"expected {expected} tensors, given {hidden.dtype} and {weight.dtype}"
    if name == "cpu" and hidden.device.type != "cpu":
        return f"expected CPU tensors, given {hidden.device}"
    return unavailable(name)


@cache
def unavailable(name: str) -> str:
    """The reason why this backend does not work on this machine; empty if it does."""
    return str(_load(name).why_not())


@cache
def _load(name: str) -> Any:
    """The backend's module: a `Backend` with `why_not()` and `info()`."""
    return importlib.import_module(MODULES[name], __package__)


@cache
def notice(message: str) -> None:
    """Warn of this once."""
    warnings.warn(message, stacklevel=2)
