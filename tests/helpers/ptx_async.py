"""Hopper's asynchronous instructions: copies by TMA and cp.async, mbarriers, wgmma.

A copy or product that has started takes place at once, as late as the program allows, or in between, by the
block's seed: copies when all warps wait for something, products and stores at the wait for their group. What
it accesses it accesses twice for the detector of races: for the thread that starts it, and for the one that
waits. Bytes that a copy may still write are pending, and nobody may touch them. Bytes that a thread wrote
must be fenced before an asynchronous instruction reads them.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx import LANES, Instruction, Mask, Step, Warp
from ptx_memory import Access, Array, PTXError
from ptx_ops import TYPES
from ptx_tasks import MBarrier, Task, swizzled


def matrix(descriptor: int, rows: int) -> Array:
    """Addresses (rows, 32) of the bytes of a K-major operand of wgmma, 16 elements of 16 bits deep."""
    swizzle = {1: 3, 2: 2, 3: 1}.get(descriptor >> 62)
    if swizzle is None or descriptor >> 49 & 7:
        raise NotImplementedError("a matrix in shared memory without a swizzle, or with a base offset")
    r, start, stride = np.arange(rows)[:, None], (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    return swizzled(start + r // 8 * stride + (r % 8 << 4 + swizzle) + np.arange(32)[None], swizzle)


def numbers(raw: Array, kind: str) -> Array:
    """Bytes of 16-bit numbers as float64."""
    if kind == "f16":
        return raw.view(np.float16).astype(np.float64)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(float)


class AsyncSteps:
    """Steps of asynchronous instructions, for `ptx_steps.Decoder`."""

    operand: Callable[..., Any]
    address: Callable[[str], Callable[[Warp], Array]]

    def _wgmma(self, x: Instruction) -> Step:
        kind = x.opcode.split(".")[1]
        if kind == "fence":
            return lambda w, mask: None
        if kind == "commit_group":
            return lambda w, mask: w.groups["wgmma"].commit()
        if kind == "wait_group":
            return lambda w, mask: w.groups["wgmma"].wait(int(x.operands[0]))
        shape = re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.\2", x.opcode)
        if not shape or x.operands[4:] != ("1", "1", "0", "0"):
            raise NotImplementedError(x.text)
        columns, names = int(shape[1]), re.findall(r"%\w+", x.operands[0])
        left, right = (self.operand(text, TYPES["u64"]) for text in x.operands[1:3])
        keep = self.operand(x.operands[3], TYPES["pred"])
        row, column = LANES // 4, np.arange(0, columns, 8)[:, None] + LANES % 4 * 2

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            a = matrix(int(left(w)[0]), 64)[16 * (w.number % 4) :][:16]
            b, add = matrix(int(right(w)[0]), columns), keep(w).all()

            def operands() -> list[Array]:
                raw = [w.block.memory["shared"].load_async(m, w.access(LANES == 0)) for m in (a, b)]
                return [numbers(m, shape[2]) for m in raw]  # type: ignore[index]

            def product() -> None:
                m, n = operands()
                result = m @ n.T
                for i, name in enumerate(names):  # two columns of row, two of row + 8, then 8 columns further
                    values = result[row + 8 * (i // 2 % 2), column[i // 4] + i % 2]
                    if add:
                        values = values + w.registers[name].view(np.float32)
                    w.registers[name] = values.astype(np.float32).view(np.uint32)

            w.groups["wgmma"].start(Task(product, lambda: operands() and None), w.block.eager())

        return step

    def _mbarrier(self, x: Instruction) -> Step:
        kind = x.opcode.split(".")[1]
        place = self.address(next(o for o in x.operands if o.startswith("[")))
        last = x.operands[2] if kind == "try_wait" else x.operands[-1]
        count = self.operand(last, TYPES["u32"]) if kind != "inval" else None
        peeks = x.opcode.startswith("mbarrier.try_wait.parity.acquire")
        """The code goes on where the barrier is not ready, and waits later."""

        def step(w: Warp, mask: Mask) -> None:
            lanes, barriers = LANES if mask is None else np.flatnonzero(mask), w.block.mbarriers
            at, number = int(place(w)[lanes[0]]), int(count(w)[lanes[0]]) if count else 0
            if kind == "init":
                barriers[at] = MBarrier(number, number, w.block.epoch)
                return
            barrier = barriers.get(at)
            if barrier is None or (barrier.epoch == w.block.epoch and w.number):
                raise PTXError("an mbarrier that is not ready")
            if kind == "inval":
                del barriers[at]
            elif kind == "arrive" and "expect_tx" in x.opcode:
                barrier.arrive(len(lanes), number)
                w.block.wake()
            elif kind == "arrive":
                barrier.arrive(len(lanes) * number, 0)
                w.block.wake()
            elif kind == "try_wait" and "parity" in x.opcode:
                ready = barrier.phase != number & 1
                w.write(x.operands[0], np.full(32, ready), mask)
                w.spins = not (ready or peeks)
            else:
                raise NotImplementedError(x.text)

        return step

    def _elect(self, x: Instruction) -> Step:
        target, _, predicate = x.operands[0].partition("|")

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            w.write(predicate, LANES == 0, mask)
            if target != "_":
                w.write(target, np.zeros(32, np.uint32), mask)

        return step

    def _fence(self, x: Instruction) -> Step:
        if x.opcode.startswith("fence.proxy.async"):
            return lambda w, mask: w.block.memory["shared"].fence(w.number)
        if x.opcode.startswith("fence.mbarrier_init"):
            return lambda w, mask: None
        raise NotImplementedError(x.text)

    def _cp(self, x: Instruction) -> Step:
        bulk = "bulk" if ".bulk." in x.opcode else "copy"
        if ".commit_group" in x.opcode:
            return lambda w, mask: w.groups[bulk].commit()
        if ".wait_group" in x.opcode:
            return lambda w, mask: w.groups[bulk].wait(int(x.operands[0]))
        if re.match(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\.(tile\.)?mbarrier", x.opcode):
            return self._tensor(x, True)
        if re.match(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.(tile\.)?bulk_group", x.opcode):
            return self._tensor(x, False)
        if x.opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
            return self._copy(x)
        raise NotImplementedError(x.text)

    def _tensor(self, x: Instruction, load: bool) -> Step:
        """A box of a matrix, to or from shared memory."""
        shared, source, *barrier = x.operands if load else (x.operands[1], x.operands[0])
        descriptor, place = source.strip("[] ").split(",", 1)
        read_map, read_shared = self.operand(descriptor.strip(), TYPES["u64"]), self.address(shared)
        coordinates = [self.operand(c.strip(), TYPES["s32"]) for c in place.strip(" {}").split(",")]
        read_barrier = self.address(barrier[0]) if load else None

        def step(w: Warp, mask: Mask) -> None:
            if load and (mask is None or mask.sum() != 1):  # CuTe lets a whole warp store, which does it once
                raise PTXError("a copy by several lanes")
            lane, block = 0 if mask is None else int(np.flatnonzero(mask)[0]), w.block
            tensor = block.program.maps[int(read_map(w)[lane])]
            here, there, inside = tensor.places(
                int(read_shared(w)[lane]), *(int(c(w)[lane]) for c in coordinates)
            )
            memory, matrix = block.memory["shared"], block.memory["global"]
            who = w.access(lane == LANES)
            if load:
                mbarrier = block.mbarriers[int(read_barrier(w)[lane])]  # type: ignore[misc]
                data = np.zeros(here.shape, np.uint8)
                data[inside] = matrix.load_async(there[inside][None], who)[0]
                memory.start_copy(here, who)

                def arrive() -> None:
                    memory.fill(here, data)
                    memory.end_copy(here)
                    mbarrier.arrive(0, -here.size)

                block.start(Task(arrive))
                return

            def write() -> None:
                data = memory.load_async(here, who)
                matrix.store_async(there[inside][None], data[inside][None], who)

            memory.load_async(here, who)
            retire = lambda: memory.load_async(here, w.access(lane == LANES))  # noqa: E731
            w.groups["bulk"].start(Task(write, retire), block.eager())

        return step

    def _copy(self, x: Instruction) -> Step:
        """4 to 16 bytes of each lane to shared memory; zeros follow those that are read."""
        shared, source = self.address(x.operands[0]), self.address(x.operands[1])
        size = int(x.operands[2], 0)
        length = self.operand(x.operands[3], TYPES["u32"]) if len(x.operands) > 3 else None

        def step(w: Warp, mask: Mask) -> None:
            lanes = LANES if mask is None else np.flatnonzero(mask)
            memory, who = w.block.memory["shared"], w.access(mask)
            here = shared(w)[lanes][:, None] + np.arange(size)
            data = np.zeros((len(lanes), size), np.uint8)
            wanted = length(w)[lanes] if length else np.full(len(lanes), size)
            full = wanted == size
            if not (full | (wanted == 0)).all():
                raise NotImplementedError("a copy that is filled up with zeros")
            if full.any():
                reader = Access(who.block, who.epoch, who.warp, who.sync, lanes[full])
                data[full] = w.block.memory["global"].load_async(
                    source(w)[lanes][full][:, None] + np.arange(size), reader
                )
            memory.start_copy(here, who)

            def arrive() -> None:
                memory.end_copy(here, w.access(mask))

            w.groups["copy"].start(Task(lambda: memory.fill(here, data), arrive), w.block.eager())

        return step
