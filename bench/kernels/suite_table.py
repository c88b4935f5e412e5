"""The tables of the GPU suite's stage `kernels`, and the bars it is held to, from its JSON record alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.table import number, table

HEAD = ("", "rows", "ms", "quartiles", "TF/s", "of limit", "peak GB", "|Δlogp|", "dX rel", "dW rel", "note")
EIGHT = ("Cut-Cross-Entropy", "Cut-Cross-Entropy, unfiltered", "TRL chunked log-prob")  # 8NHV, FP32 or not
Record = dict[str, Any]


def kernels_text(record: Record) -> str:
    """A table per shape and, last, the bars."""
    where = record["machine"].get("card") or record["machine"]["cpu"]
    parts = [
        f"{where} · torch {record['versions']['torch']}, triton {record['versions']['triton']} · "
        f"commit {record['commit']} · bf16, chunks of {record['chunk_rows']} rows unless said\n"
        "TF/s: 6NHV (scoring, 1 GEMM: 2NHV) over the median. Of limit: the bare GEMMs' time over its own,\n"
        "  median of interleaved pairs.\n"
        f"Errors: against float64 on the first {record['error_rows']} rows or half of them all."
    ]
    for shape in dict.fromkeys(tuple(case["shape"]) for case in record["cases"]):
        rows = [_row(case) for case in record["cases"] if tuple(case["shape"]) == shape]
        parts.append("N={} H={} V={}\n".format(*shape) + table(HEAD, rows))
    return "\n\n".join((*parts, *filter(None, ["\n".join(bars(record))])))


def _row(case: Record) -> list[str]:
    ms, found = case.get("ms") or {}, case.get("errors") or {}
    return [
        case["name"],
        number(case.get("rows"), "d"),
        number(ms.get("median"), ".2f"),
        f"{ms['low']:.2f}–{ms['high']:.2f}" if ms else "–",
        number(case.get("effective_tflops"), ".0f"),
        number(case.get("of_limit"), ".3f"),
        number(case["peak_bytes"] / 1e9 if case.get("peak_bytes") is not None else None, ".2f"),
        number(found.get("logp_max_abs"), ".1e"),
        number(found.get("d_hidden_rel"), ".1e"),
        number(found.get("d_weight_rel"), ".1e"),
        f"error: {case['error']}" if case.get("error") else case.get("note", ""),
    ]


def bars(record: Record) -> Iterator[str]:
    """The bars for an H200 at the first shape, a line each; silent about what was not measured."""
    if record.get("dry_run") or not record["cases"]:
        return
    first = tuple(record["cases"][0]["shape"])
    at = {case["name"]: case for case in record["cases"] if tuple(case["shape"]) == first and case.get("ms")}
    mine = min((c for name, c in at.items() if name.startswith("ours, ") and name not in ("ours, scoring",
                "ours, exact")), key=lambda c: c["ms"]["median"], default=None)  # fmt: skip
    if mine is not None:
        yield f"fastest of ours at {first}: {mine['name']}"
        yield _bar("share of the bare GEMMs' rate", mine["of_limit"], 0.90)
        yield _bar("TF/s", mine["effective_tflops"], 700)
        rate = mine["effective_tflops"]
        if "Liger CISPO" in at:
            yield _bar("times Liger's CISPO", rate / at["Liger CISPO"]["effective_tflops"], 8)
        peers = [at[name]["effective_tflops"] for name in EIGHT if name in at]
        if peers:
            yield _bar("times the best 8NHV peer", rate / max(peers), 1.25)
    if "ours, scoring" in at:
        yield _bar("scoring, share of one bare GEMM's rate", at["ours, scoring"]["of_limit"], 0.85)


def _bar(what: str, value: float, bar: float) -> str:
    return f"  {what}: {value:.3g}, bar {bar:g}: {'met' if value >= bar else 'NOT MET'}"
