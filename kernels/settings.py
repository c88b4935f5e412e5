"""How the policy loss is computed: everything that is not a tensor, and a number for it that compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from kernels.objectives import CISPO, KL, Objective, SequenceObjective

_DEFAULT = CISPO()
RowKernel = Literal["two-pass", "spx", "lean"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What `policy_loss` was asked for, checked. See there for what each means."""

    objective: Objective | SequenceObjective = _DEFAULT
    kl: KL | None = None
    entropy_bonus: float = 0.0
    softcap: float = 0.0
    logits_dtype: torch.dtype = torch.float32
    exact: bool = False
    row_kernel: RowKernel = "two-pass"
    chunk_rows: int | None = None
    weight_parts: int = 3
    group: dist.ProcessGroup | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if not (callable(self.objective) or isinstance(self.objective, SequenceObjective)):
            raise ValueError(f"objective: expected an objective such as CISPO(), given {self.objective!r}")
        if not self.softcap >= 0:
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


_numbered: list[Settings] = []
_number: dict[Settings, int] = {}


@torch.compiler.assume_constant_result
def number(
    objective: Objective | SequenceObjective | None, kl: KL | None, entropy_bonus: float,
    softcap: float | None, logits_dtype: torch.dtype, exact: bool, row_kernel: RowKernel,
    chunk_rows: int | None, weight_parts: int, group: dist.ProcessGroup | None, backend: str | None,
) -> int:  # fmt: skip
    """The number of these settings: a custom op takes integers, not objects. torch.compile asks once."""
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; expected a number above 0, or None")
    settings = Settings(
        _DEFAULT if objective is None else objective, kl, entropy_bonus, softcap or 0.0, logits_dtype, exact,
        row_kernel, chunk_rows, weight_parts, group, backend,
    )  # fmt: skip
    try:
        hash(settings)
    except TypeError:
        raise ValueError(
            f"objective: expected a function or a frozen dataclass, given {objective!r}"
        ) from None
    if settings not in _number:
        _number[settings] = len(_numbered)
        _numbered.append(settings)
    return _number[settings]


def numbered(index: int) -> Settings:
    """The settings of a number."""
    return _numbered[index]
