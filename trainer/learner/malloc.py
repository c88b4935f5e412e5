"""Settings of glibc's malloc."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
NEVER, PAD = -1, 64 << 20


def keep_freed_memory() -> bool:
    """Let the process keep large blocks that are freed; returns False where there is no glibc.

    Otherwise every tensor of several megabytes is mapped and its pages zeroed again: at 30 layers a ninth of
    the learner's CPU time. The process keeps a step's peak, which the memory estimate counts anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, NEVER), mallopt(M_TOP_PAD, PAD)])
