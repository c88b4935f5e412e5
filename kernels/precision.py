"""Matrix products with full FP32 operands and sums, whatever precision the caller allows elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0  # threads in the context: torch's settings are global, so the last thread to leave restores them
_before: list[str] = []
_fp16_sums = False  # the caller's permission
_older: str | None = None  # the setting of the older API, unless the caller uses the newer one


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Neither TF32 nor FP16 sums on CUDA, nor bf16 on the CPU inside; then the caller's settings again."""
    global _inside, _before, _fp16_sums, _older
    mkldnn: Any = torch.backends.mkldnn  # its stubs lack `matmul`
    cuda: Any = torch.backends.cuda.matmul
    backends = cuda, mkldnn.matmul
    with _lock:
        if not _inside:
            _before = [backend.fp32_precision for backend in backends]
            _fp16_sums, cuda.allow_fp16_accumulation = cuda.allow_fp16_accumulation, False
            try:
                _older = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("highest")  # else another thread's allow_tf32 would raise
            except RuntimeError:  # it raises for every caller after a change by the newer API
                _older = None
            for backend in backends:
                backend.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                cuda.allow_fp16_accumulation = _fp16_sums
                if _older is not None:
                    torch.set_float32_matmul_precision(_older)
                for backend, precision in zip(backends, _before, strict=True):
                    backend.fp32_precision = precision
