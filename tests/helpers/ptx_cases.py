"""Calls of the Triton backend with their results' errors, in bounds, against float64; run without a GPU.

A program, since Triton's interpreter must be off: `python tests/helpers/ptx_cases.py PATTERN SEEDS BARRIERS`
prints JSON. Each case that PATTERN matches runs under that many schedules; if BARRIERS is 1, also once for
each barrier that it passes, without that barrier.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ahead_of_time import Machine
from ptx_memory import RaceError
from torch import Tensor

Case = Callable[[], float]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(x: Tensor, exact: Tensor) -> float:
    """Largest error in bounds: 1e-5 of the largest result in FP32, or the rounding of 16 bits as well."""
    precision = {FP32: 0.0, BF16: 2.0**-8, FP16: 2.0**-11}[x.dtype]
    bound = 1e-5 * exact.abs().max().clamp(min=1e-6) + precision * (1 + 1e-3) * exact.abs()
    worst = ((x.double() - exact).abs() / bound).nan_to_num(torch.inf)
    return float(worst.max())


def logits(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits as the op pads them, targets, inverse temperatures); the last target is another shard's."""
    z = (3 * randn(rows, -(-vocabulary // 16) * 16))[:, :vocabulary]
    y = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1))
    y[-1] = vocabulary + 3
    return z, y, 0.5 + torch.arange(rows) / rows


def scaled(z: Tensor, scale: Tensor, cap: float) -> Tensor:
    z = z.double()
    return (cap * (z / cap).tanh() if cap else z) * scale[:, None].double()


def stats_error(stats: Tensor, u: Tensor, y: Tensor, anchor: Tensor) -> float:
    """The error of (4, rows) statistics of scaled logits u, for this anchor."""
    at_target = torch.arange(u.shape[1]) == y[:, None]
    v = u - anchor[:, None].double()
    exp = torch.where(at_target, 0.0, v.exp())
    exact = [anchor.double(), exp.sum(1), (u * at_target).sum(1), (exp * v).sum(1)]
    return max(error(found, x) for found, x in zip(stats, exact, strict=True))


def row_stats(rows: int, vocabulary: int, block: int, warps: int, cap: float) -> float:
    from kernels.triton import rows as kernel

    z, y, scale = logits(rows, vocabulary)
    u = scaled(z, scale, cap)
    stats = kernel.row_stats(z, y, scale, cap, kernel.RowConfig(block, warps))
    return stats_error(stats, u, y, u.max(1).values)


def cases() -> dict[str, Case]:
    """All cases by name."""
    return {
        "row_stats": partial(row_stats, 2, 1100, 512, 4, 0.0),
        "row_stats cap": partial(row_stats, 2, 1100, 512, 2, 30.0),
        "row_stats shipped": partial(row_stats, 2, 9001, 4096, 8, 0.0),
    }


def report(pattern: str, seeds: int, barriers: bool) -> dict[str, Any]:
    """Of each case its errors under each schedule, and what became of each barrier taken out."""
    from triton.runtime.jit import JITFunction

    found = {}
    for name, case in cases().items():
        if not re.search(pattern, name):
            continue
        machine = Machine()
        JITFunction.run = lambda kernel, *args, machine=machine, **options: machine.launch(
            kernel, *args, **options
        )
        errors = []
        for machine.seed in range(seeds):
            errors.append(case())
        removed = {}
        if barriers:
            for kernel, places in machine.barriers.items():
                removed[kernel] = [without(machine, (kernel, at), case) for at in places]
        found[name] = {"errors": errors, "removed": removed}
    return found


def without(machine: Machine, barrier: tuple[str, int], case: Case) -> str:
    """What shows that a barrier is missing: "race", "wrong" or "nothing"; "never" if no warp came there."""
    if barrier[1] not in machine.passed[barrier[0]]:
        return "never"
    machine.removed = barrier
    try:
        return "nothing" if case() < 1 else "wrong"
    except RaceError:
        return "race"
    finally:
        machine.removed = None


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")))
