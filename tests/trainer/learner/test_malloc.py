"""Promise of the allocator: freed memory is used again, without the system zeroing its pages again."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from trainer.learner.process import keep_freed_memory

def new_pages():
    counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(4):
        step = [torch.ones(10 << 20) for _ in range(3)]  # larger than any that glibc keeps by itself
        del step
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    return counts[1] - counts[0], counts[4] - counts[3]

print(*new_pages())
assert keep_freed_memory()
print(*new_pages())
"""


@pytest.mark.slow
def test_the_memory_of_a_step_is_used_again_by_the_next() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    (first, last), (first_kept, last_kept) = (map(int, line.split()) for line in run.stdout.splitlines())
    assert last > 0.2 * first and last_kept < 0.1 * first_kept
