"""Promise of the allocator: freed memory is used again, without the system zeroing its pages again."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from trainer.learner.process import keep_freed_memory
if {keep}:
    assert keep_freed_memory()
counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(5):
    step = [torch.ones(10 << 20) for _ in range(6)]
    del step
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(counts[1] - counts[0], counts[5] - counts[4])
"""


@pytest.mark.parametrize("keep", [True, False])
def test_the_memory_of_a_step_is_used_again_by_the_next(keep: bool) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)], capture_output=True, text=True, check=True
    )
    first, last = map(int, result.stdout.split())
    assert last < 0.1 * first if keep else last > 0.2 * first
