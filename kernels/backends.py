"""Which code does the work: `cpu` (native C++), `triton` (CUDA) or `torch` (anywhere)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kernels import torch_backend

BACKENDS = ("cpu", "triton", "torch")


Score = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


class Backend(Protocol):
    """What a backend does with one chunk of C rows; `kernels.rows` says what the statistics are.

    targets (C,) are columns of this weight; one outside [0, V) is in another rank's shard of the vocabulary.
    cap is the logits' soft cap, 0 for none.
    """

    def prepare(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
        """The head as the methods below take it, logits being of `dtype`."""

    def logits(self, h: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (C, V) = h Wᵀ in FP32."""

    def row_stats(self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float) -> Tensor:
        """(4, C) statistics of the rows of z (C, V), which stays."""

    def row_grads(
        self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, cap: float, anchor: Tensor,
        a: Tensor, b: Tensor | None, k: Tensor | None, dz_y: Tensor, exact: bool,
    ) -> Tensor:  # fmt: skip
        """The logits' gradient, in place of z; exact: as FP32 has it, not bf16."""

    def d_hidden(self, dz: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (C, H) FP32 = dz W."""

    def add_d_weight(self, dz: Tensor, h: Tensor, out: Tensor) -> None:
        """out (V, H) FP32 += dzᵀ h."""

    @property
    def score(self) -> Score | None:
        """Statistics (4, N) of (h, weight, targets, inverse_temperature, cap) without (N, V) logits."""


class SinglePass(Backend, Protocol):
    """A backend that stores E = e^{u − anchor} in bf16, Ê_y = −others, while it sums: see `kernels.op`."""

    def single_pass(
        self, z: Tensor, targets: Tensor, inverse_temperature: Tensor, logprobs_gen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(Ê (C, V) in place of z, (4, C) statistics to an anchor of its choice)."""

    def fused_epilogue(
        self, h: Tensor, weight: Tensor, targets: Tensor, inverse_temperature: Tensor, logprobs_gen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same from the GEMM's own epilogue: FP32 logits never reach memory."""


def choose(hidden: Tensor, weight: Tensor, name: str | None) -> tuple[str, Backend]:
    """The backend asked for, or the best for these tensors. ValueError if the one asked for cannot."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; expected one of {', '.join(BACKENDS)}, or None")
    if name is None:
        name = {"cpu": "cpu", "cuda": "triton"}.get(hidden.device.type, "torch")
        reason = _why_not(name, hidden, weight)
        if not reason:
            return name, _load(name)
        if _unavailable(name):
            _notice(name, reason)
        return "torch", cast(Backend, torch_backend)
    reason = _why_not(name, hidden, weight)
    if reason:
        raise ValueError(f"backend {name!r} cannot do this: {reason}")
    return name, _load(name)


def backend_info() -> dict[str, dict[str, Any]]:
    """For each backend whether it works here, why not, and what it uses (ISA, threads, versions)."""
    info: dict[str, dict[str, Any]] = {}
    for name in BACKENDS:
        reason = _unavailable(name)
        info[name] = {"available": not reason} | ({"why_not": reason} if reason else _load_info(name))
    return info


def _why_not(name: str, hidden: Tensor, weight: Tensor) -> str:
    """Why this backend cannot take these tensors; empty if it can."""
    if name == "torch":
        return ""
    types = {hidden.dtype, weight.dtype}
    if not types <= {torch.float32, torch.bfloat16}:
        return f"it takes FP32 and BF16, given {hidden.dtype} and {weight.dtype}"
    if name == "cpu" and hidden.device.type != "cpu":
        return f"it takes CPU tensors, given {hidden.device}"
    return _unavailable(name)


@cache
def _unavailable(name: str) -> str:
    """Why this backend does not work on this machine; empty if it does."""
    if name == "torch":
        return ""
    return cast(str, _module(name).why_not())


@cache
def _load(name: str) -> Backend:
    return cast(Backend, _module(name))


def _load_info(name: str) -> dict[str, Any]:
    return {"torch": torch.__version__} if name == "torch" else _module(name).info()


def _module(name: str) -> Any:
    modules = {"cpu": "kernels.native", "triton": "kernels.triton.backend", "torch": "kernels.torch_backend"}
    return importlib.import_module(modules[name])


@cache
def _notice(name: str, reason: str) -> None:
    warnings.warn(f"kernels: the torch backend does the work of {name!r}: {reason}", stacklevel=2)
