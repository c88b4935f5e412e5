"""How providers of the loss are measured and tabulated, by bench.kernels.compare and by the GPU suite."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from bench.kernels.problem import LossAnswer, LossProblem, errors_of
from bench.kernels.providers import Provider
from bench.measure import cuda_peak_bytes, interleaved, summary
from bench.records import Record, reason
from bench.table import number, spread, table

HEAD = ("", "rows", "ms", "quartiles", "TF/s", "× limit", "peak MB", "|Δlogp|", "dX rel", "dW rel", "note")
COLUMNS = """\
  ms, quartiles   of one forward + backward over the rounds
  TF/s            6NHV (scoring: 2NHV) over the median, whatever the provider computes
  × limit         its time over that of the bare GEMMs, the median over the rounds
  peak MB         growth of memory during one call, dX and dW included: of the process's resident peak on the
                  CPU (each provider in a process of its own), of torch's allocator on CUDA
  |Δlogp|         largest distance of a log-prob from float64, in nats
  dX rel, dW rel  ‖gradient − float64's‖ / ‖float64's‖"""


def measure(
    providers: Sequence[Provider],
    p: LossProblem,
    rounds: int,
    limit: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Record]:
    """Time the providers in turns; on CUDA measure peak memory, too. `limit` names the one that is × 1."""
    device = p.hidden.device.type
    calls = {provider.name: partial(provider.run, p) for provider in providers}
    times, failed = interleaved(calls, rounds, device, say)
    n, h, v = p.shape
    measured: dict[str, Record] = {}
    for provider in providers:
        name, ms = provider.name, summary(times[provider.name])
        record = measured[name] = {"rows": n, "ms": ms, "rounds_ms": times[name]}
        if name in failed:
            record["error"] = reason(failed[name])
            continue
        record["effective_tflops"] = provider.flops * n * h * v / ms["median"] / 1e9
        if limit in times and limit not in failed and name != limit:
            pairs = zip(times[name], times[limit], strict=True)
            record["of_limit"] = statistics.median(bound / own for own, bound in pairs)
        if device == "cuda":
            record["peak_bytes"] = cuda_peak_bytes(calls[name])
            record["memory_method"] = "torch.cuda.max_memory_allocated"
    return measured


def errors(provider: Provider, p: LossProblem, truth: LossAnswer | None) -> dict[str, float]:
    """The provider's errors on this problem; none for bare GEMMs, or without a truth."""
    return errors_of(provider.run(p), truth) if truth else {}


def free_memory() -> None:
    """Drop what the last provider left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def providers_table(cases: Sequence[Record]) -> str:
    """One line per provider, from the records alone."""
    rows = []
    for record in cases:
        of_limit, peak, off = (record.get(key) for key in ("of_limit", "peak_bytes", "errors"))
        note = f"error: {record['error']}" if record.get("error") else record.get("skipped")
        rows.append([
            record["name"],
            number(record.get("rows"), "d"),
            *spread(record.get("ms"), ".2f"),
            number(record.get("effective_tflops"), ".3g"),
            number(1 / of_limit if of_limit else None, ".2f"),
            number(None if peak is None else peak / 2**20, ".0f"),
            *(number((off or {}).get(k), ".1e") for k in ("logp_max_abs", "d_hidden_rel", "d_weight_rel")),
            note or record.get("note", ""),
        ])  # fmt: skip
    return table(HEAD, rows)
