"""The settings of the policy loss, and a registry that stands for them where only numbers may be passed.

A custom op takes tensors, numbers and strings. Objectives and process groups are therefore registered, and
the op gets their numbers.
"""

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist

from .objectives import CISPO, OBJECTIVES
from .term import KL, Objective, SequenceObjective

NAMESPACE = __name__.partition(".")[0]  # of the custom ops: kernels, or sigmoid_rl_kernels beside it
DEFAULT = CISPO()
RowKernel = Literal["auto", "two-pass", "single-pass", "fused-epilogue"]
TWO_PASSES_ONLY = ("softcap", "entropy_bonus", "exact", "group")  # settings that need the logits twice


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of `policy_loss` that are not tensors, checked; it documents each."""

    objective: Objective | SequenceObjective = DEFAULT
    kl: KL | None = None
    entropy_bonus: float = 0.0
    softcap: float | None = None
    logits_dtype: torch.dtype = torch.float32
    exact: bool = False
    weight_parts: int = 3
    row_kernel: RowKernel = "auto"
    chunk_rows: int | None = None
    drop_masked: bool = True
    group: dist.ProcessGroup | None = None
    backend: str | None = None

    @property
    def cap(self) -> float:
        """The soft cap, 0 for none."""
        return self.softcap or 0.0

    @property
    def needs_two_passes(self) -> str:
        """A setting with which one pass over the logits is not enough; empty if there is none."""
        return next((name for name in TWO_PASSES_ONLY if getattr(self, name)), "")

    def __post_init__(self) -> None:
        item, makers = self.objective, [entry.make for entry in OBJECTIVES.values()]
        known = not isinstance(item, type) and (callable(item) or isinstance(item, SequenceObjective))
        for name, holds, expected in (
            ("objective", known and item not in makers, "an objective such as CISPO()"),
            ("kl", isinstance(self.kl, KL | None), "a KL, or None"),
            ("group", isinstance(self.group, dist.ProcessGroup | None), "a ProcessGroup, or None"),
            ("entropy_bonus", math.isfinite(self.entropy_bonus), "a number"),
            ("softcap", self.softcap is None or 0 < self.softcap < math.inf, "a number above 0, or None"),
            ("chunk_rows", self.chunk_rows is None or self.chunk_rows >= 1, "at least 1"),
            ("weight_parts", self.weight_parts in (2, 3), "2 or 3"),
            ("row_kernel", self.row_kernel in get_args(RowKernel), f"one of {get_args(RowKernel)}"),
        ):
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected {expected}")
        if self.row_kernel in ("single-pass", "fused-epilogue") and (wrong := self.needs_two_passes):
            raise ValueError(f"row_kernel {self.row_kernel!r} does not support {wrong}; use 'two-pass'")
        if self.row_kernel == "fused-epilogue" and self.logits_dtype != torch.float32:
            raise ValueError("'fused-epilogue' rounds no logits to logits_dtype; use 'single-pass'")


F = TypeVar("F", bound=Callable[..., Any])
Registered = Objective | SequenceObjective | KL | dist.ProcessGroup | Settings | None

_lock = threading.Lock()
_count = itertools.count(1)
_objects: dict[int, Callable[[], Any]] = {0: lambda: None}
_indices: dict[Any, int] = {None: 0}
# Functions are held weakly: closures may hold tensors, and a training loop may make a new one at every step.
_function_indices: weakref.WeakKeyDictionary[FunctionType, int] = weakref.WeakKeyDictionary()


def register(item: Registered) -> int:
    """The number under which `lookup` finds this object."""
    # To torch.compile two functions with the same code but different closures or defaults look the same,
    # unless their identity is an argument.
    return _register(item, id(item) if isinstance(item, FunctionType) else 0)


def _register(item: Registered, identity: int) -> int:
    """The same; torch.compile calls it once for each pair of arguments."""
    weak = isinstance(item, FunctionType)
    indices: Any = _function_indices if weak else _indices
    with _lock:
        try:
            index: int | None = indices.get(item)
        except TypeError:
            raise ValueError(
                f"objective: expected a function or a frozen dataclass, given {item!r}"
            ) from None
        if index is None:
            index = next(_count)
            forget = lambda _: _objects.pop(index, None)  # noqa: E731  # a callback that needs `index`
            _objects[index] = weakref.ref(item, forget) if weak else lambda: item
            indices[item] = index
    return index


# torch.compiler.assume_constant_result sets this, but it would import the compiler, which takes two seconds.
_register._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function's own attribute


def traced(op: F) -> F:
    """The op, which torch.compile leaves out before torch 2.13: that fails at a frozen dataclass, and takes
    one function for another of the same code."""
    return torch.compiler.disable(op) if torch.__version__ < "2.13" else op


def lookup(index: int) -> Any:
    """The object registered under this number. RuntimeError if it was a function that no longer exists."""
    item = _objects.get(index, lambda: None)()
    if index and item is None:
        raise RuntimeError(
            "the objective no longer exists: create it outside of the compiled function and keep a reference"
        )
    return item
