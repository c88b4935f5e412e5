"""FP32 products in FP32, whatever the caller allows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def ieee_fp32() -> Iterator[None]:
    """No TF32 on CUDA and no bf16 on the CPU inside; the caller's settings stand again outside."""
    mkldnn: Any = torch.backends.mkldnn  # its stubs lack `matmul`
    places = torch.backends.cuda.matmul, mkldnn.matmul
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
