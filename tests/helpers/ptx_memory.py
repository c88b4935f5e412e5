"""Memory of interpreted PTX: bytes with bounds and alignment, and a detector of unordered accesses.

Two accesses of a byte, one of them a write, are ordered if one thread made both, if a barrier of the block is
between them (another epoch), or if one warp made both and synchronised itself in between. Any other pair is a
race. That does not depend on the schedule, as long as addresses and branches do not. A write of the value
that is there already changes nothing and may meet other writes; Triton writes replicated values like that.
Blocks of a grid are never ordered.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
some = np.count_nonzero  # quicker than `any` of 32
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class PTXError(Exception):
    """An access or a synchronisation that PTX does not define."""


class RaceError(PTXError):
    """Two accesses whose order nothing decides."""


@dataclass(slots=True)
class Access:
    """The threads that access memory: lanes (n,) of a warp, between its block's and its own barriers."""

    block: int
    epoch: int
    """Counts the barriers of all blocks of a launch."""
    warp: int
    sync: int
    """Counts the warp's own barriers."""
    lanes: Array


class Shadow:
    """Of each byte: the last write, and the reads since the last barrier of the block."""

    def __init__(self, size: int) -> None:
        self.write_epoch, self.writer, self.write_sync, self.write_block = np.zeros((4, size), np.int64)
        self.read_epoch, self.read_warps, self.read_sync, self.read_lanes = np.zeros((4, size), np.int64)
        self.read_block = np.zeros(size, np.int64)
        self.pending, self.unfenced = np.zeros((2, size), bool)
        """What a copy may still write; what threads wrote and no fence shows to asynchronous reads."""

    def read(self, at: Array, a: Access) -> None:
        """Note a read of bytes at (n, bytes); RaceError if a write of them is not ordered before it."""
        if some(self.pending[at]):
            raise RaceError("a read and a copy that may still write")
        if some(self._written(at, a)):
            raise RaceError("a read and another thread's write")
        stale = self.read_epoch[at] != a.epoch
        self.read_warps[at[stale]] = 0
        self.read_lanes[at[stale | (self.read_sync[at] != a.sync)]] = 0
        self.read_epoch[at], self.read_sync[at] = a.epoch, a.sync
        self.read_warps[at] |= 1 << a.warp
        np.bitwise_or.at(self.read_lanes, at, (1 << a.lanes)[:, None])
        one = (self.read_block[at] == 0) | (self.read_block[at] == a.block)
        self.read_block[at] = np.where(one, a.block, -1)

    def write(self, at: Array, a: Access, changed: Array) -> None:
        """Note a write, which changes these bytes; RaceError if another access is not ordered before it."""
        if some(self.pending[at]):
            raise RaceError("a write and a copy that may still write")
        if some(self._written(at, a) & changed):
            raise RaceError("two writes of different values")
        others = (self.read_warps[at] & ~(1 << a.warp)) != 0
        lanes = (self.read_lanes[at] & ~(1 << a.lanes)[:, None]) != 0
        unordered = (self.read_epoch[at] == a.epoch) & (others | (lanes & (self.read_sync[at] == a.sync)))
        block = self.read_block[at]
        if some(unordered | ((block != 0) & (block != a.block))):
            raise RaceError("a write and another thread's read")
        self.write_epoch[at], self.write_sync[at], self.write_block[at] = a.epoch, a.sync, a.block
        self.writer[at] = (32 * a.warp + a.lanes)[:, None]

    def _written(self, at: Array, a: Access) -> Array:
        """Where another thread's last write has no order with this access."""
        block = self.write_block[at]
        unordered, recent = (block != 0) & (block != a.block), self.write_epoch[at] == a.epoch
        if some(recent):
            writer = self.writer[at]
            neighbour = (writer % 32 != a.lanes[:, None]) & (self.write_sync[at] == a.sync)
            unordered |= recent & ((writer // 32 != a.warp) | neighbour)
        return unordered


class Memory:
    """Bytes from address `base` on, of which those in `valid` may be accessed."""

    def __init__(self, size: int, base: int, poison: np.random.Generator | None, races: bool) -> None:
        size = -(-size // 16) * 16
        self.base, self.size = base, size
        self.bytes = np.zeros(size, np.uint8) if poison is None else poison.integers(0, 256, size, np.uint8)
        self.elements = {n: self.bytes.view(t) for n, t in UNSIGNED.items()}
        self.valid = np.zeros(size, bool)
        self.shadow = Shadow(size) if races else None

    def load(self, addresses: Array, size: int, count: int, a: Access) -> list[Array]:
        """`count` arrays (n,) of elements of `size` bytes, which follow each other from addresses (n,) on."""
        at = self.offsets(addresses, size * count)
        if self.shadow:
            self.shadow.read(at[:, None] + np.arange(size * count), a)
        index = at // size
        return [self.elements[size][index + i] for i in range(count)]

    def store(self, addresses: Array, values: list[Array], size: int, a: Access) -> None:
        """Store what `load` loads. Threads of one access may not write different values to one byte."""
        at = self.offsets(addresses, size * len(values))
        where = at[:, None] + np.arange(size * len(values))
        before = self.bytes[where] if self.shadow else None
        for i, value in enumerate(values):
            self.elements[size][at // size + i] = value
        for i, value in enumerate(values):
            if some(self.elements[size][at // size + i] != value):
                raise RaceError("two lanes of a store")
        if self.shadow:
            self.shadow.write(where, a, self.bytes[where] != before)
            self.shadow.unfenced[where] = True

    def load_async(self, addresses: Array, a: Access) -> Array:
        """Bytes at (n, bytes), read by an instruction that these threads have started, or have waited for."""
        at = self.offsets(addresses, 1)
        if self.shadow:
            if self.shadow.unfenced[at].any():
                raise RaceError("an asynchronous read and a write that is not fenced")
            self.shadow.read(at, a)
        return self.bytes[at]

    def store_async(self, addresses: Array, data: Array, a: Access) -> None:
        """The same for a write."""
        at = self.offsets(addresses, 1)
        if self.shadow:
            self.shadow.write(at, a, np.ones(at.shape, bool))
        self.bytes[at] = data

    def start_copy(self, addresses: Array, a: Access) -> None:
        """From now on nobody may touch these bytes, which nobody reads any more.

        The copy is no thread: even what its own thread has read needs a barrier before it.
        """
        if self.shadow:
            at, lanes = self.offsets(addresses, 1), np.full_like(a.lanes, 32)
            self.shadow.write(at, replace(a, lanes=lanes), np.ones(at.shape, bool))
            self.shadow.pending[at], self.shadow.unfenced[at] = True, False

    def fill(self, addresses: Array, data: Array) -> None:
        """What a copy brings arrives."""
        self.bytes[self.offsets(addresses, 1)] = data

    def end_copy(self, addresses: Array, a: Access | None = None) -> None:
        """The bytes may be read: by everybody, or by the threads that have waited for them."""
        if self.shadow:
            at = self.offsets(addresses, 1)
            self.shadow.pending[at] = False
            self.shadow.write_epoch[at] = 0
            if a:
                self.shadow.write(at, a, np.ones(at.shape, bool))

    def fence(self, warp: int) -> None:
        """Show what a warp's threads wrote to asynchronous reads."""
        if self.shadow:
            self.shadow.unfenced &= self.shadow.writer // 32 != warp

    def offsets(self, addresses: Array, size: int) -> Array:
        """Offsets (n,) of accesses of `size` bytes; PTXError where one is outside or not aligned."""
        at = addresses.astype(np.int64) - self.base
        if some(at % size):
            raise PTXError(f"an address is no multiple of {size}")
        if some(at.view(np.uint64) > self.size - size):  # or below 0
            raise PTXError("an address is outside of the memory")
        if some(~(self.valid[at] & self.valid[at + size - 1])):
            raise PTXError("an address is outside of every tensor")
        return at
