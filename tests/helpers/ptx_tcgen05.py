"""Blackwell's tensor memory and products: `tcgen05` for a cluster of one block, with 128 rows.

Tensor memory is 128 lanes of 512 words, NaN at first. A product takes place, in its order, at the latest
when the mbarrier of the commit after it is signalled, which is done as late as copies are. A load reads at
once, by the block's seed, or at the wait for loads. PTX leaves its registers undefined until that wait, but
NVIDIA's compiler itself moves reads of them before it, so that they are read when an instruction needs them.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from ptx import LANES, Instruction, Mask, Step, Warp
from ptx_async import matrix, numbers
from ptx_memory import Array, PTXError
from ptx_ops import TYPES
from ptx_tasks import Task

FORMATS = {1 << 4: "f16", 1 << 4 | 1 << 7 | 1 << 10: "bf16"}
"""Types of both operands by the descriptor but for the shape: sums are FP32, nothing is negated."""


class TensorMemorySteps:
    """Steps of `tcgen05`, for `ptx_steps.Decoder`."""

    operand: Callable[..., Any]
    address: Callable[[str], Callable[[Warp], Array]]

    def _tcgen05(self, x: Instruction) -> Step:
        kind = x.opcode.split(".")[1]
        steps = {
            "alloc": self._allocate,
            "mma": self._product,
            "commit": self._commit,
            "ld": self._from_tensor,
        }
        if "cta_group::2" not in x.opcode and kind in steps:
            return steps[kind](x)
        if kind == "wait::ld":
            return _wait
        if kind in ("dealloc", "relinquish_alloc_permit"):
            return lambda w, mask: w.together(mask)
        raise NotImplementedError(x.text)

    def _allocate(self, x: Instruction) -> Step:
        """All of the tensor memory, whose address is 0."""
        place, columns = self.address(x.operands[0]), self.operand(x.operands[1], TYPES["u32"])

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            if int(columns(w)[0]) != 512 or w.block.tensor is not None:
                raise NotImplementedError("a part of the tensor memory")
            w.block.tensor = np.full((128, 512), np.nan, np.float32)
            w.block.memory["shared"].store(place(w)[:1], [np.zeros(1, np.uint32)], 4, w.access(LANES == 0))

        return step

    def _product(self, x: Instruction) -> Step:
        place = self.address(x.operands[0])
        left, right = (self.operand(text, TYPES["u64"]) for text in x.operands[1:3])
        descriptor = self.operand(x.operands[3], TYPES["u32"])
        masks = [self.operand(t.strip(), TYPES["u32"]) for t in x.operands[4].strip("{}").split(",")]
        keep = self.operand(x.operands[5], TYPES["pred"])
        if ".kind::f16." not in x.opcode:
            raise NotImplementedError(x.text)

        def step(w: Warp, mask: Mask) -> None:
            lane, add, block = one(mask), bool(keep(w)[one(mask)]), w.block
            shape, column = int(descriptor(w)[lane]), int(place(w)[lane])
            rows, columns = (shape >> 24 & 31) << 4, (shape >> 17 & 63) << 3
            operands = FORMATS.get(shape & 0x1FFFF)
            if rows != 128 or not operands or any(int(m(w)[lane]) for m in masks):
                raise NotImplementedError("a product of another type or shape")
            if block.tensor is None or column + columns > 512:
                raise PTXError("a product outside of the tensor memory")
            places = matrix(int(left(w)[lane]), rows), matrix(int(right(w)[lane]), columns)
            target, who = block.tensor[:, column : column + columns], w.access(lane == LANES)

            def product() -> None:
                a, b = (numbers(block.memory["shared"].load_async(p, who), operands) for p in places)
                target[:] = a @ b.T + (target if add else 0)

            block.products.append(Task(product))

        return step

    def _commit(self, x: Instruction) -> Step:
        place = self.address(x.operands[0])

        def step(w: Warp, mask: Mask) -> None:
            barrier, before = w.block.mbarriers[int(place(w)[one(mask)])], list(w.block.products)

            def arrive() -> None:
                for task in before:
                    task.finish()
                barrier.arrive(1, 0)
                w.block.wake()

            w.block.start(Task(arrive))

        return step

    def _from_tensor(self, x: Instruction) -> Step:
        """A word of each of so many columns, from the lane of tensor memory that is the thread's own."""
        names, place = re.findall(r"%\w+", x.operands[0]), self.address(x.operands[1])
        if not re.fullmatch(rf"tcgen05\.ld\.sync\.aligned\.32x32b\.x{len(names)}\.b32", x.opcode):
            raise NotImplementedError(x.text)

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            row, column = divmod(int(place(w)[0]), 1 << 16)
            if row != 32 * (w.number % 4) or column + len(names) > 512 or w.block.tensor is None:
                raise PTXError("a load from another warp's part of the tensor memory, or from outside of it")
            words = w.block.tensor[row : row + 32].view(np.uint32)

            def load() -> None:
                for i, name in enumerate(names):
                    w.registers.setdefault(name, words[:, column + i].copy())

            task = Task(load)
            for name in names:
                w.registers.pop(name, None)
                w.registers.loads[name] = task
            w.groups["tensor"].start(task, w.block.eager())

        return step


def _wait(w: Warp, mask: Mask) -> None:
    w.groups["tensor"].commit()
    w.groups["tensor"].wait(0)


def one(mask: Mask) -> int:
    """The lane that alone takes part; PTXError if several do."""
    if mask is None or mask.sum() != 1:
        raise PTXError("an instruction of one thread by several lanes")
    return int(np.flatnonzero(mask)[0])
