"""Rates of loss kernels as measured: by the GPU suite, bench.kernels.compare, or pytest-benchmark.

A file is of one machine. Of several shapes that whose H·V is nearest to the model's counts, and of the cases
of a head, which differ in how it is computed, the fastest.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from trainer.accounting.kernel_cost import Head
from trainer.config import ConfigError

ROW_KERNELS = ("two-pass", "single-pass", "fused-epilogue")
CASES = {  # of each head
    "naive FP32": ("naive FP32",),
    "best peer": ("Liger CISPO", "Cut-Cross-Entropy, unfiltered", "TRL chunked log-prob"),
    "ours": tuple(f"ours, {kernel}" for kernel in ROW_KERNELS),
}


class Case(NamedTuple):
    """One implementation, timed at one shape."""

    name: str
    shape: tuple[int, int, int]  # N, H, V
    dtype: str  # of hidden states and weight; empty: not said
    tflops: float  # 6NHV over its time


def measured_heads(record: Mapping[str, Any], hidden: int, vocabulary: int, dtype: str = "") -> list[Head]:
    """The heads that a record has measured. ConfigError: it has none, or is from a dry run."""
    if record.get("dry_run"):
        raise ConfigError("the rates are from a dry run, whose times mean nothing; expected a measurement")
    cases = [case for case in _cases(record) if not dtype or case.dtype in ("", dtype)]
    if not cases:
        raise ConfigError(
            f"the rates have no timed case{f' in {dtype}' if dtype else ''}; expected kernels.json of the "
            "GPU suite, bench.kernels.compare's --out or pytest-benchmark's --benchmark-json"
        )
    size = np.log(hidden * vocabulary)
    nearest = min((case.shape for case in cases), key=lambda shape: abs(np.log(shape[1] * shape[2]) - size))
    fastest: dict[str, Head] = {}
    for case in sorted(cases, key=lambda case: case.tflops):
        name = case.name.split(", chunk")[0]
        for head, names in CASES.items():
            if case.shape == nearest and (name in names or (head == "ours" and name.startswith("ours ("))):
                text = f"MEASURED on {_machine(record)}: {case.name} at N,H,V = {list(nearest)}"
                fastest[head] = Head(head, case.tflops, text)
    return list(fastest.values())


def _cases(record: Mapping[str, Any]) -> Iterator[Case]:
    if "benchmarks" in record:  # pytest-benchmark
        for row in record["benchmarks"]:
            shape, name = row.get("extra_info", {}).get("shape"), (row.get("params") or {}).get("name")
            if shape and name:
                n, h, v = shape
                rate = 6 * n * h * v / row["stats"]["median"] / 1e12
                yield Case(name, (n, h, v), _dtype_in(row["name"]), rate)
        return
    whole = record.get("shape") or {}  # of all cases; the GPU suite has one for each, and is in bf16
    dtype = record.get("dtype", "" if whole else "bfloat16")
    for case in record["cases"]:
        n, h, v = case.get("shape") or (whole["N"], whole["H"], whole["V"])
        rate = case.get("effective_tflops")
        if not rate and case.get("ms"):
            rate = 6 * n * h * v / case["ms"]["median"] / 1e9
        if rate:
            yield Case(case["name"], (n, h, v), dtype, rate)


def _dtype_in(name: str) -> str:
    """The type in a test's name, such as test_policy_loss[ours-float32]."""
    return next((dtype for dtype in ("float32", "bfloat16", "float16") if dtype in name), "")


def _machine(record: Mapping[str, Any]) -> str:
    machine = record.get("machine") or record.get("machine_info") or {}
    cpu = machine.get("cpu")
    name = machine.get("card") or (cpu.get("brand_raw") if isinstance(cpu, Mapping) else cpu) or "unknown"
    commit = record.get("commit") or (record.get("commit_info") or {}).get("id", "")[:7]
    return f"{name}, commit {commit}"
