"""What goes on beside a block's warps: tasks that have started, mbarriers, and matrices that TMA copies."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from ptx_memory import Array, PTXError


@dataclass(slots=True)
class Task:
    """A copy or product; `run` does it, `retire` is called when it has been waited for."""

    run: Callable[[], None]
    retire: Callable[[], None] = lambda: None
    done: bool = False

    def finish(self) -> None:
        if not self.done:
            self.run()
        self.done = True


@dataclass(slots=True)
class Groups:
    """A warp's tasks of one kind: those of the open group, then committed groups, oldest first."""

    open: list[Task] = field(default_factory=list)
    committed: list[list[Task]] = field(default_factory=list)

    def start(self, task: Task, eager: bool) -> None:
        """Add a task; if eager and those before it are done, do it at once."""
        before = [t for group in [*self.committed, self.open] for t in group]
        self.open.append(task)
        if eager and all(t.done for t in before):
            task.finish()

    def commit(self) -> None:
        self.committed.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """Finish all but the last `pending` groups."""
        while len(self.committed) > pending:
            for task in self.committed.pop(0):
                task.finish()
                task.retire()


@dataclass(slots=True)
class MBarrier:
    """A barrier in shared memory that also counts bytes."""

    count: int
    pending: int
    epoch: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, arrivals: int, expected: int) -> None:
        """Count arrivals and expected bytes; copied ones are expected less."""
        self.pending, self.bytes = self.pending - arrivals, self.bytes + expected
        if self.pending < 0:
            raise PTXError("more arrivals at an mbarrier than it expects")
        if self.pending == self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


@dataclass(frozen=True, slots=True)
class TensorMap:
    """What a TMA descriptor says of a matrix."""

    address: int
    shape: tuple[int, int]
    stride: int
    """Bytes from a row to the next."""
    box: tuple[int, int]
    size: int
    """Bytes of an element."""
    swizzle: int
    """0, or 1 to 3 for patterns of 32 to 128 bytes."""

    def places(self, shared: int, column: int, row: int) -> tuple[Array, Array, Array]:
        """A box's bytes (rows, bytes): addresses in shared memory and in the matrix, and which exist."""
        rows, width = np.arange(self.box[0])[:, None], self.box[1] * self.size
        inner = np.arange(width)[None]
        here = swizzled(shared + rows * width + inner, self.swizzle)
        outer = column * self.size + inner
        inside = (row + rows < self.shape[0]) & (row + rows >= 0) & (outer < self.shape[1] * self.size)
        return here, self.address + (row + rows) * self.stride + outer, inside & (outer >= 0)


def swizzled(address: Array, swizzle: int) -> Array:
    """Where a byte of shared memory lies under a swizzle of 2^swizzle chunks of 16 bytes (0: none)."""
    return address ^ (((address >> 7) & ((1 << swizzle) - 1)) << 4)
