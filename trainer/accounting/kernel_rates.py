"""Rates of loss kernels as bench.kernels.compare has measured them, on one machine at one shape."""

from collections.abc import Mapping
from typing import Any

from trainer.accounting.kernel_cost import Head
from trainer.config import ConfigError

ROW_KERNELS = ("two-pass", "single-pass", "fused-epilogue")
HEADS = {  # how the names of its cases begin; the fastest counts
    "naive FP32": "naive FP32",
    "best peer": ("Liger CISPO", "Cut-Cross-Entropy, unfiltered", "TRL chunked log-prob"),
    "ours": "ours (",
}


def measured_heads(record: Mapping[str, Any], dtype: str) -> list[Head]:
    """The heads that a record has timed with hidden states and weight of this type. ConfigError: none."""
    timed = [case for case in record["cases"] if case.get("ms")]
    if record["dtype"] != dtype or not timed:
        raise ConfigError(
            f"the rates have no timed case in {dtype}; expected the --out of bench.kernels.compare, as of "
            "the GPU suite's stage `kernels`"
        )
    shape = [record["shape"][name] for name in "NHV"]
    n, h, v = shape
    where = record.get("machine", {})
    machine = f"{where.get('card') or where.get('cpu')}, commit {record.get('commit')}"
    fastest: dict[str, Head] = {}
    for case in sorted(timed, key=lambda case: -case["ms"]["median"]):
        source = f"MEASURED on {machine}: {case['name']} at N,H,V = {shape}"
        for head, beginnings in HEADS.items():
            if case["name"].startswith(beginnings):
                fastest[head] = Head(head, 6 * n * h * v / case["ms"]["median"] / 1e9, source)
    return list(fastest.values())
