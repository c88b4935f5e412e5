"""FP32 products in FP32, whatever the caller allows elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_inside = 0  # threads that multiply now: the settings are the process's, so the last one out restores them
_before: list[str] = []


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """No TF32 on CUDA and no bf16 on the CPU inside; the caller's settings stand again outside."""
    global _inside, _before
    mkldnn: Any = torch.backends.mkldnn  # its stubs lack `matmul`
    places = torch.backends.cuda.matmul, mkldnn.matmul
    with _lock:
        if not _inside:
            _before = [place.fp32_precision for place in places]
            for place in places:
                place.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                for place, precision in zip(places, _before, strict=True):
                    place.fp32_precision = precision
