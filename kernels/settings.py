"""How the policy loss is computed: all that is not a tensor, and numbers for what a graph cannot hold."""

from __future__ import annotations

from dataclasses import dataclass
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
        if not (callable(self.objective) or isinstance(self.objective, SequenceObjective)):
            raise ValueError(f"objective: expected an objective such as CISPO(), given {self.objective!r}")
        if self.softcap is not None and not self.softcap > 0:
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


_objects: list[Any] = [None]
_numbers: dict[Any, int] = {None: 0}


def number(thing: Objective | SequenceObjective | KL | dist.ProcessGroup | None) -> int:
    """The number of an object: a custom op takes numbers, not objects. torch.compile asks once."""
    try:
        known = thing in _numbers
    except TypeError:
        raise ValueError(f"objective: expected a function or a frozen dataclass, given {thing!r}") from None
    if not known:
        _numbers[thing] = len(_objects)
        _objects.append(thing)
    return _numbers[thing]


# What torch.compiler.assume_constant_result sets; that imports the compiler, two seconds for everyone.
number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a function's own attribute


def numbered(index: int) -> Any:
    """The object of a number."""
    return _objects[index]
