"""Cost of the loss beside its three bare GEMMs on an H100 or H200, by account. [1 s]

    python -m bench kernels.account

No GPU is needed, and nothing here was measured on one: rates are assumptions, named at `CARDS`; bytes follow
from the code of `kernels`; instructions are counted in the machine code that Triton emits for sm_90
(`tests/kernels/test_triton_compile.py` compares them). A pass takes as long as its bytes or its instructions,
whichever is longer, and passes follow one another.
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from bench.harness import Case, Row
from bench.table import table

OPTIONS: dict[str, Any] = {}
INSTRUCTIONS = {"row_stats": 8.3, "row_grads": 15.0, "single_pass": 22.1, "score": 7.3, "fused_epilogue": 8.8}
"""Instructions of a thread for each logit, in the main loop of a row kernel or the epilogue of a GEMM."""
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
CHUNK_ROWS = (8192, 16384)
"""Rows of a chunk: those that are always taken, and those that need 10 GB at the paper's sizes."""
CALL_LAUNCHES, CHUNK_LAUNCHES = 35, 12
"""Operations of a call (masks, statistics) and of each chunk, as counted in Triton's interpreter."""
COLUMNS = 256
"""Columns of a tile of the GEMM kernel, which stores three FP32 statistics for each row of a tile."""


def bare(card: Card, n: int, h: int, v: int, gemms: int = 3) -> float:
    """Seconds of the GEMMs alone."""
    return gemms * 2 * n * h * v / card.gemm


def extra(
    card: Card, n: int, h: int, v: int, kernel: str, efficiency: float = 1.0, chunk_rows: int = CHUNK_ROWS[0]
) -> dict[str, float]:
    """Seconds of everything beside the bare GEMMs, by what takes them.

    kernel: a `row_kernel`, or "scoring", which has one GEMM. efficiency: that of Triton's GEMM, without its
    epilogue, as a share of cuBLAS's; it matters for "fused-epilogue" and "scoring".
    """
    chunks = -(-n // chunk_rows)
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
    costs = {}
    if kernel == "fused-epilogue":
        costs["epilogue"] = n * v * INSTRUCTIONS["fused_epilogue"] / card.issue
        costs["slower GEMM"], costs["tiles' statistics"] = slower, partial
        costs["bf16 E written"] = (1 - HIDDEN) * 2 * n * v * stream
    else:
        costs["FP32 logits written"] = (1 - HIDDEN) * 4 * n * v * stream
    if kernel == "two-pass":
        costs["row_stats"] = pass_over_logits("row_stats", 4)
        costs["row_grads"] = pass_over_logits("row_grads", 6)
    elif kernel == "single-pass":
        costs["single_pass"] = pass_over_logits("single_pass", 6)
    if kernel != "two-pass":  # dX scaled in place in FP32, h scaled and rounded
        costs["rows scaled"] = (8 + 12) * n * h * stream
    costs["dX rounded"] = (2 + 6) * n * h * stream
    if chunks > 1:  # dW is an FP32 sum: 2 bytes more in the first GEMM, read and written in the others
        costs["dW summed"] = (2 + 8 * (chunks - 1)) * v * h * stream
        costs["dW rounded"] = 6 * v * h * stream
    costs["launches"] = (CALL_LAUNCHES + CHUNK_LAUNCHES * chunks) * card.launch
    return costs


def ratio(
    card: Card, n: int, h: int, v: int, kernel: str, efficiency: float = 1.0, chunk_rows: int = CHUNK_ROWS[0]
) -> float:
    """The bare GEMMs' time as a share of the whole."""
    gemms = bare(card, n, h, v, 1 if kernel == "scoring" else 3)
    return gemms / (gemms + sum(extra(card, n, h, v, kernel, efficiency, chunk_rows).values()))


SHAPES = ((16384, 4096, 151936), (16384, 2048, 151936), (4096, 4096, 151936), (512, 4096, 151936))
KERNELS = (
    ("two-pass", 1.0), ("single-pass", 1.0),
    *((name, efficiency) for name in ("fused-epilogue", "scoring") for efficiency in (0.85, 0.92, 0.98)),
)  # fmt: skip


def measure(card: Card, kernel: str, efficiency: float, chunk_rows: int) -> Row:
    """The ratio at every shape, and the milliseconds of the first one's parts."""
    parts = {"GEMMs": bare(card, *SHAPES[0]), **extra(card, *SHAPES[0], kernel, efficiency, chunk_rows)}
    ratios = [ratio(card, *shape, kernel, efficiency, chunk_rows) for shape in SHAPES]
    return {"ratios": ratios, "ms": {name: 1e3 * seconds for name, seconds in parts.items()}}


def cases(options: Namespace) -> Iterator[Case]:
    """Every kernel on every card, by the rows of its chunks; scoring has none."""
    for kernel, efficiency in KERNELS:
        rate = f" ({efficiency:.2f})" if kernel in ("fused-epilogue", "scoring") else ""
        for rows, card in product(CHUNK_ROWS[: 1 if kernel == "scoring" else 2], CARDS):
            yield f"{kernel}{rate}, {rows}, {card.name}", partial(measure, card, kernel, efficiency, rows)


def describe(head: Row, rows: Sequence[Row]) -> str:
    """The ratios as a table, and the parts of the first shape for the kernels without a GEMM of their own."""
    lines = [[*row["case"].split(", "), *(f"{x:.2f}" for x in row["ratios"])] for row in rows]
    shapes = [f"N={n} H={h}" for n, h, _ in SHAPES]
    text = [table(["kernel (its GEMM, of cuBLAS's rate)", "rows of a chunk", "card", *shapes], lines)]
    for row in rows:
        if row["case"].startswith(("two-pass", "single-pass")):
            text.append(f"{row['case']}, ms: " + ", ".join(f"{k} {ms:.2f}" for k, ms in row["ms"].items()))
    return "\n\n".join(text)
