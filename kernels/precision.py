"""Full FP32 matrix products, whatever precision the caller allows elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0  # threads in the context: torch's settings are global, so the last thread to leave restores them
_before: list[str] = []


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """Neither TF32 on CUDA nor bf16 on the CPU inside; afterwards the caller's settings apply again."""
    global _inside, _before
    mkldnn: Any = torch.backends.mkldnn  # its stubs lack `matmul`
    backends = torch.backends.cuda.matmul, mkldnn.matmul
    with _lock:
        if not _inside:
            _before = [backend.fp32_precision for backend in backends]
            for backend in backends:
                backend.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                for backend, precision in zip(backends, _before, strict=True):
                    backend.fp32_precision = precision
