"""Tables for a terminal, made from the JSON records alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, numbers to the right, a last note left."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    left = {0, len(head) - 1 if head[-1] == "note" else 0}

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(w) if i in left else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join((line(head), "  ".join("-" * w for w in widths), *map(line, rows)))


def number(value: Any, form: str = ".3g") -> str:
    """`value` in `form`; a dash for None, text as it is."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else format(value, form)


def compare_rows(cases: Sequence[dict[str, Any]], fastest: str | None) -> list[list[str]]:
    """Rows of bench.kernels.compare's table; `fastest` names the case whose time is 1.00."""
    unit = next((c["ms"]["median"] for c in cases if c["name"] == fastest and c.get("ms")), None)
    rows = []
    for case in cases:
        ms, found = case.get("ms") or {}, case.get("errors") or {}
        median = ms.get("median")
        note = f"error: {case['error']}" if case.get("error") else case.get("skipped") or case.get("note", "")
        rows.append([
            case["name"],
            number(median, ".1f"),
            f"{ms['low']:.1f}–{ms['high']:.1f}" if ms else "–",
            number(median / unit if median and unit else None, ".2f"),
            number(case["peak_bytes"] / 2**20 if case.get("peak_bytes") is not None else None, ".0f"),
            number(found.get("logp_max_abs"), ".1e"),
            number(found.get("d_hidden_rel"), ".1e"),
            number(found.get("d_weight_rel"), ".1e"),
            note,
        ])  # fmt: skip
    return rows


COMPARE_HEAD = ("", "ms", "quartiles", "× limit", "peak MB", "|Δlogp|", "dX rel", "dW rel", "note")
