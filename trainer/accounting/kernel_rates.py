"""Rates of loss kernels as `python -m bench kernels.compare` has measured them, on one machine."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainer.accounting.kernel_cost import Head
from trainer.config import ConfigError
from trainer.jsonl import read_lines

EXPECTED = "expected the --out of `python -m bench kernels.compare`, as of the GPU suite's stage `kernels`"
HEADS: dict[str, str | tuple[str, ...]] = {  # how the names of its cases begin; the fastest counts
    "naive FP32": "naive FP32",
    "best peer": ("Liger CISPO", "Cut-Cross-Entropy, unfiltered", "TRL chunked log-prob"),
    "ours": "ours (",
}


@dataclass(frozen=True, slots=True)
class Rates:
    """Times of implementations."""

    shape: tuple[int, int, int]  # N, H, V
    dtype: str  # of hidden states and weight
    machine: str
    ms: dict[str, float]  # of forward and backward, median


def read_rates(path: Path) -> Rates:
    """Read a record. ConfigError: it is none, or cannot be read."""
    try:
        head, *rows = read_lines(path)
        options, machine = head["options"], head["machine"]
        times = defaultdict[str, list[float]](list)
        for row in rows:
            if "ms" in row:
                times[row["provider"]].append(row["ms"])
        name = f"{machine.get('card') or machine['cpu']}, commit {head['commit']}"
        shape = int(options["rows"]), int(options["hidden"]), int(options["vocab"])
        return Rates(shape, options["dtype"], name, {name: median(ms) for name, ms in times.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{path}: {EXPECTED} ({type(e).__name__}: {e})") from e


def measured_heads(rates: Rates, dtype: str) -> list[Head]:
    """The heads that a record has timed with hidden states and weight of this type. ConfigError: none."""
    if rates.dtype != dtype or not rates.ms:
        raise ConfigError(f"the rates have no timed case in {dtype}; {EXPECTED}")
    n, h, v = rates.shape
    fastest: dict[str, Head] = {}
    for name, ms in sorted(rates.ms.items(), key=lambda case: -case[1]):
        source = f"MEASURED on {rates.machine}: {name} at N,H,V = {[n, h, v]}"
        for head, beginnings in HEADS.items():
            if name.startswith(beginnings):
                fastest[head] = Head(head, 6 * n * h * v / ms / 1e9, source)
    return list(fastest.values())
