"""What the loss costs beside its three bare GEMMs, by an account of bytes, instructions and launches.

    python -m bench.kernels.account

No GPU is needed, and nothing here was measured on one: rates are assumptions, named at `CARDS`; bytes follow
from the code of `kernels`; instructions are counted in the machine code that Triton emits for sm_90
(`tests/kernels/test_triton_compile.py` compares them). A pass takes as long as its bytes or its instructions,
whichever is longer, and passes follow one another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

INSTRUCTIONS = {"row_stats": 8.3, "row_grads": 15.0, "single_pass": 22.1, "score": 7.3, "fused_epilogue": 8.8}
"""Of a thread for each logit, in the main loop of a row kernel or the epilogue of a GEMM."""
HIDDEN = 0.8
"""Share of a GEMM's FP32 logits that is written while the next tile is multiplied."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU's reachable rates: what a good kernel attains, not the data sheet's."""

    name: str
    gemm: float = 790e12
    """bf16 FLOP/s of a large GEMM at the clock that the power limit leaves."""
    bandwidth: float = 3.0e12
    """Bytes/s of a kernel that streams through memory."""
    issue: float = 132 * 128 * 1.6e9
    """Instructions/s of all threads: 132 multiprocessors, 4 warps of 32 a cycle, 1.6 GHz."""
    launch: float = 3e-6
    """Seconds of a kernel that does almost nothing, or of a host that launches it."""


CARDS = (Card("H200", bandwidth=4.3e12), Card("H100"))
CHUNK_ROWS = 8192
CALL_LAUNCHES, CHUNK_LAUNCHES = 35, 12
"""Operations of a call (masks, statistics) and of each chunk, as counted in Triton's interpreter."""
COLUMNS = 256
"""Columns of a tile of the GEMM kernel, which stores three FP32 statistics for each row of a tile."""


def bare(card: Card, n: int, h: int, v: int, gemms: int = 3) -> float:
    """Seconds of the GEMMs alone."""
    return gemms * 2 * n * h * v / card.gemm


def extra(card: Card, n: int, h: int, v: int, kernel: str, efficiency: float = 1.0) -> dict[str, float]:
    """Seconds of everything beside the bare GEMMs, by what takes them.

    kernel: a `row_kernel`, or "scoring", which has one GEMM. efficiency: that of Triton's GEMM, without its
    epilogue, as a share of cuBLAS's; it matters for "fused-epilogue" and "scoring".
    """
    chunks = -(-n // CHUNK_ROWS)
    stream = 1 / card.bandwidth

    def pass_over_logits(name: str, size: int) -> float:
        """`size` bytes a logit, or the kernel's instructions if they take longer."""
        return n * v * max(size * stream, INSTRUCTIONS[name] / card.issue)

    partial = 2 * 12 * n * v / COLUMNS * stream  # written, and read by `merge`
    slower = bare(card, n, h, v, 1) * (1 / efficiency - 1)
    if kernel == "scoring":
        return {
            "epilogue": n * v * INSTRUCTIONS["score"] / card.issue, "slower GEMM": slower,
            "tiles' statistics": partial, "launches": 10 * card.launch,
        }  # fmt: skip
    found = {}
    if kernel == "fused-epilogue":
        found["epilogue"] = n * v * INSTRUCTIONS["fused_epilogue"] / card.issue
        found["slower GEMM"], found["tiles' statistics"] = slower, partial
        found["bf16 E written"] = (1 - HIDDEN) * 2 * n * v * stream
    else:
        found["FP32 logits written"] = (1 - HIDDEN) * 4 * n * v * stream
    if kernel == "two-pass":
        found["row_stats"], found["row_grads"] = (
            pass_over_logits("row_stats", 4),
            pass_over_logits("row_grads", 6),
        )
    elif kernel == "single-pass":
        found["single_pass"] = pass_over_logits("single_pass", 6)
    if kernel != "two-pass":  # dX scaled in place in FP32, h scaled and rounded
        found["rows scaled"] = (8 + 12) * n * h * stream
    found["dX rounded"] = (2 + 6) * n * h * stream
    if chunks > 1:  # dW is an FP32 sum: 2 bytes more in the first GEMM, read and written in the others
        found["dW summed"] = (2 + 8 * (chunks - 1)) * v * h * stream
        found["dW rounded"] = 6 * v * h * stream
    found["backward's scaling"] = 4 * (v + n) * h * stream
    found["launches"] = (CALL_LAUNCHES + CHUNK_LAUNCHES * chunks) * card.launch
    return found


def ratio(card: Card, n: int, h: int, v: int, kernel: str, efficiency: float = 1.0) -> float:
    """The bare GEMMs' time as a share of the whole."""
    gemms = bare(card, n, h, v, 1 if kernel == "scoring" else 3)
    return gemms / (gemms + sum(extra(card, n, h, v, kernel, efficiency).values()))


SHAPES = ((16384, 4096, 151936), (16384, 2048, 151936), (4096, 4096, 151936), (512, 4096, 151936))
KERNELS = (
    ("two-pass", 1.0), ("single-pass", 1.0),
    *((name, efficiency) for name in ("fused-epilogue", "scoring") for efficiency in (0.85, 0.92, 0.98)),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the ratios as a table, and the parts of the first shape."""
    print("| kernel (its GEMM, of cuBLAS's rate) | card |", *(f"N={n} H={h} |" for n, h, _ in SHAPES))
    print("|---|---|" + "---|" * len(SHAPES))
    for kernel, efficiency in KERNELS:
        rate = f" ({efficiency:.2f})" if kernel in ("fused-epilogue", "scoring") else ""
        for card in CARDS:
            ratios = (f"{ratio(card, *shape, kernel, efficiency):.2f} |" for shape in SHAPES)
            print(f"| {kernel}{rate} | {card.name} |", *ratios)
    for card in CARDS:
        for kernel in ("two-pass", "single-pass"):
            parts = extra(card, *SHAPES[0], kernel)
            text = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
            print(f"\n{card.name}, {kernel}, ms: GEMMs {1e3 * bare(card, *SHAPES[0]):.1f}, {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
