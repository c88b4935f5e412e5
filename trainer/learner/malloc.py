"""How the process's memory is taken from the system and given back."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h
NEVER, PAD = -1, 64 << 20


def keep_freed_memory() -> bool:
    """From now on large blocks that are freed stay with the process; False where there is no glibc.

    Else each tensor of many megabytes is mapped anew and its pages zeroed, then written: at 30 layers a ninth
    of a learner's CPU time. What is kept is the peak of a step, which its memory estimate counts anyway.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, NEVER), mallopt(M_TOP_PAD, PAD)])
