"""How the policy loss is computed: all that is not a tensor, and numbers for what a graph cannot hold."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist

from kernels.objectives import CISPO, KL, Objective, SequenceObjective

DEFAULT = CISPO()
RowKernel = Literal["two-pass", "spx", "lean"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What `policy_loss` was asked for, checked. See there for what each means."""

    objective: Objective | SequenceObjective = DEFAULT
    kl: KL | None = None
    entropy_bonus: float = 0.0
    softcap: float | None = None
    logits_dtype: torch.dtype = torch.float32
    exact: bool = False
    weight_parts: int = 3
    row_kernel: RowKernel = "two-pass"
    chunk_rows: int | None = None
    group: dist.ProcessGroup | None = None
    backend: str | None = None

    @property
    def cap(self) -> float:
        """The soft cap, 0 for none."""
        return self.softcap or 0.0

    def __post_init__(self) -> None:
        known = callable(self.objective) or isinstance(self.objective, SequenceObjective)
        if not known or isinstance(self.objective, type):
            raise ValueError(f"objective: expected an objective such as CISPO(), given {self.objective!r}")
        if not math.isfinite(self.entropy_bonus):
            raise ValueError(f"entropy_bonus is {self.entropy_bonus}; expected a number")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap is {self.softcap}; expected a number above 0, or None")
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"chunk_rows is {self.chunk_rows}; expected at least 1")
        if self.weight_parts not in (2, 3):
            raise ValueError(f"weight_parts is {self.weight_parts}; expected 2 or 3")
        if self.row_kernel not in ("two-pass", "spx", "lean"):
            raise ValueError(f"row_kernel is {self.row_kernel!r}; expected 'two-pass', 'spx' or 'lean'")
        if self.row_kernel != "two-pass":
            for name in ("softcap", "entropy_bonus", "exact", "group"):
                if getattr(self, name):
                    raise ValueError(f"row_kernel {self.row_kernel!r} has no {name}; use 'two-pass'")
        if self.row_kernel == "lean" and self.logits_dtype != torch.float32:
            raise ValueError("row_kernel 'lean' has no logits to round to logits_dtype; use 'spx'")


Numbered = Objective | SequenceObjective | KL | dist.ProcessGroup | None

_lock = threading.Lock()
_count = itertools.count(1)
_objects: dict[int, Callable[[], Any]] = {0: lambda: None}
_kept: dict[Any, int] = {None: 0}
# not kept: closures may hold tensors, and a loop may make one each step
_functions: weakref.WeakKeyDictionary[FunctionType, int] = weakref.WeakKeyDictionary()


def number(thing: Numbered) -> int:
    """The number of an object: a custom op takes numbers, not objects."""
    # Two functions of one code but other closures or defaults look the same to torch.compile, unless it is
    # shown that their identity matters.
    return _number(thing, id(thing) if isinstance(thing, FunctionType) else 0)


def _number(thing: Numbered, identity: int) -> int:
    """The same; torch.compile asks once for each `thing` and `identity`."""
    weak = isinstance(thing, FunctionType)
    numbers: Any = _functions if weak else _kept
    with _lock:
        try:
            index: int | None = numbers.get(thing)
        except TypeError:
            raise ValueError(
                f"objective: expected a function or a frozen dataclass, given {thing!r}"
            ) from None
        if index is None:
            index = next(_count)
            gone = lambda _: _objects.pop(index, None)  # noqa: E731  # a callback that needs `index`
            _objects[index] = weakref.ref(thing, gone) if weak else lambda: thing
            numbers[thing] = index
    return index


# What torch.compiler.assume_constant_result sets; that imports the compiler, two seconds for everyone.
_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function's own attribute


def numbered(index: int) -> Any:
    """The object of a number; a function must still be held by whoever asked for its number."""
    found = _objects.get(index, lambda: None)()
    if index and found is None:
        raise RuntimeError("the objective is gone: make it outside of the compiled function, and hold it")
    return found
