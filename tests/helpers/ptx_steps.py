"""The instructions of PTX as Python functions of a warp, and kernels made of them."""

import re
from collections.abc import Callable, Iterable

import numpy as np
from ptx import LANES, PARAMETERS, SHARED, Instruction, Kernel, Mask, Program, Step, Warp
from ptx_async import AsyncSteps
from ptx_memory import UNSIGNED, Array
from ptx_ops import TYPES, DType, arithmetic
from ptx_tasks import TensorMap
from ptx_tcgen05 import TensorMemorySteps


def program(
    kernel: Kernel, shared: int, removed: Iterable[int] = (), maps: dict[int, TensorMap] | None = None
) -> Program:
    """A kernel ready to run with this many bytes of shared memory, without some instructions.

    maps: the matrices whose TMA descriptors are at these addresses among the parameters.
    """
    decoder = Decoder(kernel)
    kernel.steps = kernel.steps or [decoder.step(x) for x in kernel.code]
    steps, whole = list(kernel.steps), {i for i, x in enumerate(kernel.code) if ".sync" in x.opcode}
    for at in removed:
        waits = kernel.code[at].opcode.startswith("mbarrier.try_wait")  # without it nothing is waited for
        operands = (kernel.code[at].operands[0], "-1") if waits else ()
        steps[at] = decoder.step(Instruction("", "mov.pred" if waits else "nop", operands, "removed"))
    return Program(kernel, shared, steps, decoder.width, maps or {}, whole.difference(removed))


class Decoder(AsyncSteps, TensorMemorySteps):
    """Makes Python functions of a kernel's instructions."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def step(self, x: Instruction) -> Step:
        """What an instruction does, which stands at this place in the code."""
        step = self._step(x)
        if not x.guard:
            return step
        register, negated, branches = x.guard.lstrip("!"), x.guard[0] == "!", x.opcode.startswith("bra")

        def guarded(w: Warp, mask: Mask) -> None:
            wanted = w.registers[register] ^ negated
            wanted = wanted if mask is None else wanted & mask
            lanes = np.count_nonzero(wanted)
            if lanes == 32:
                step(w, None)
            elif lanes or branches:
                step(w, wanted)

        return guarded

    def _step(self, x: Instruction) -> Step:
        name = x.opcode.split(".")[0]
        if name in ("ld", "st"):
            return self._access(x)
        if name == "mov" and "{" in x.operands[0] + x.operands[1]:
            return self._packed(x)
        special = getattr(self, f"_{name}", None)
        if special:
            step: Step = special(x)
            return step
        return self._arithmetic(x)

    def _arithmetic(self, x: Instruction) -> Step:
        if x.opcode.startswith("mov."):
            t = TYPES[x.opcode.split(".")[-1]]
            function, types, result = (lambda a: a), [t], t
        else:
            function, types, result = arithmetic(x.opcode)
        target, *operands = x.operands
        reads = [self.operand(text, t) for text, t in zip(operands, types, strict=True)]
        to = self.width(target)

        def step(w: Warp, mask: Mask) -> None:
            value = np.asarray(function(*[read(w) for read in reads]), result)
            w.write(target, bits(value, to), mask)

        return step

    def width(self, register: str) -> DType:
        """The unsigned type, or bool, in which a register is held."""
        prefix = register if register in self.kernel.registers else register.rstrip("0123456789")
        t = TYPES[self.kernel.registers[prefix]]
        return t if t.kind == "b" else np.dtype(f"u{t.itemsize}")

    def operand(self, text: str, t: DType) -> Callable[[Warp], Array]:
        """Reads an operand as type t."""
        kernel = self.kernel
        if re.match(r"%(n?ctaid|n?tid|laneid|warpid|cluster_ctarank)\b", text):
            return lambda w: w.block.special(text, w)
        if text[0] == "%" or text in kernel.registers:
            if t in (bool, self.width(text)):
                return lambda w: w.registers[text]
            same = self.width(text).itemsize == t.itemsize
            unsigned = np.dtype(f"u{t.itemsize}")
            if same:
                return lambda w: w.registers[text].view(t)
            return lambda w: w.registers[text].astype(unsigned).view(t)
        if text[:2] in ("0f", "0d"):
            number = int(text[2:], 16)
        elif text in kernel.parameters:
            number = PARAMETERS + kernel.parameters[text][0]
        else:
            number = SHARED if text in ("global_smem", "__dynamic_shmem__0") else int(text, 0)
        if t.kind == "b":
            constant = np.full(32, number != 0)
        else:
            wrapped = np.array(number & ((1 << 8 * t.itemsize) - 1), f"u{t.itemsize}")
            constant = np.broadcast_to(wrapped.view(t), 32)
        return lambda w: constant

    def address(self, text: str) -> Callable[[Warp], Array]:
        """Reads an address, `[register + offset]` or `[name + offset]`, as int64."""
        base, _, offset = (part.strip() for part in text.strip("[] ").partition("+"))
        wide = not base.startswith("%") or self.width(base).itemsize == 8
        read = self.operand(base, TYPES["u64" if wide else "u32"])
        constant = int(offset or 0)
        return lambda w: read(w).astype(np.int64) + constant

    def _access(self, x: Instruction) -> Step:
        name, space, *modifiers, kind = x.opcode.split(".")
        space, t = space.split("::")[0], TYPES[kind]
        vector = next((m for m in modifiers if re.fullmatch(r"v\d", m)), "v1")
        count, size = int(vector[1]), t.itemsize
        if space not in ("global", "shared", "param") or set(modifiers) - {vector, "nc", "relaxed"}:
            raise NotImplementedError(x.text)
        registers, place = x.operands if name == "ld" else x.operands[::-1]
        names, address = elements(registers), self.address(place)
        if len(names) != count:
            raise NotImplementedError(x.text)
        widths = [self.width(n) if n.startswith("%") else np.dtype(UNSIGNED[size]) for n in names]
        reads = [self.operand(n, np.dtype(UNSIGNED[size])) for n in names] if name == "st" else []

        def load(w: Warp, mask: Mask) -> None:
            lanes = LANES if mask is None else np.flatnonzero(mask)
            values = w.block.memory[space].load(address(w)[lanes], size, count, w.access(mask))
            for register, value, width in zip(names, values, widths, strict=True):
                whole = np.zeros(32, UNSIGNED[size])
                whole[lanes] = value
                w.write(register, bits(whole.view(t), width), mask)

        def store(w: Warp, mask: Mask) -> None:
            lanes = LANES if mask is None else np.flatnonzero(mask)
            w.block.memory[space].store(
                address(w)[lanes], [read(w)[lanes] for read in reads], size, w.access(mask)
            )

        return load if name == "ld" else store

    def _packed(self, x: Instruction) -> Step:
        """Move between a register and the parts of it in several."""
        whole, parts = (x.operands[0], elements(x.operands[1])) if "{" in x.operands[1] else x.operands[::-1]
        names = parts if isinstance(parts, list) else elements(parts)
        t = np.dtype(UNSIGNED[TYPES[x.opcode.split(".")[-1]].itemsize])
        part = np.dtype(UNSIGNED[t.itemsize // len(names)])
        reads = [self.operand(n, part) for n in names if n != "_"]
        read_whole = self.operand(whole, t)

        def join(w: Warp, mask: Mask) -> None:
            w.write(whole, np.stack([read(w) for read in reads], 1).copy().view(t)[:, 0], mask)

        def split(w: Warp, mask: Mask) -> None:
            values = np.ascontiguousarray(read_whole(w))[:, None].view(part)
            for i, name in enumerate(names):
                if name != "_":
                    w.write(name, values[:, i].copy(), mask)

        return join if "{" in x.operands[1] else split

    def _nop(self, x: Instruction) -> Step:
        return lambda w, mask: None

    _prefetch = _setmaxnreg = _griddepcontrol = _nop

    def _cvta(self, x: Instruction) -> Step:
        return self._arithmetic(Instruction("", "mov.b64", x.operands, x.text))

    def _bra(self, x: Instruction) -> Step:
        to = self.kernel.labels[x.operands[0]]

        def step(w: Warp, mask: Mask) -> None:
            if mask is None or (mask == w.active).all():
                w.at = to
            elif mask.any():
                w.parted.append((to, mask))
                w.active = w.active & ~mask

        return step

    def _ret(self, x: Instruction) -> Step:
        def step(w: Warp, mask: Mask) -> None:
            w.active = w.active & False if mask is None else w.active & ~mask
            w.done = not (w.parted or w.active.any())
            if w.parted and not w.active.any():
                self_at, w.active = w.parted.pop()
                w.at = self_at

        return step

    def _bar(self, x: Instruction) -> Step:
        number = self.operand(x.operands[0], TYPES["u32"]) if x.opcode != "bar.warp.sync" else None
        threads = self.operand(x.operands[1], TYPES["u32"]) if len(x.operands) > 1 else None

        def block(w: Warp, mask: Mask) -> None:
            w.together(mask)
            everybody = w.block.kernel.threads
            w.block.arrive(
                int(number(w)[0]), int(threads(w)[0]) if threads else everybody, w, x.opcode == "bar.sync"
            )

        def warp(w: Warp, mask: Mask) -> None:
            w.together(mask)
            w.sync += 1

        if x.opcode in ("bar.sync", "bar.arrive"):
            return block
        if x.opcode == "bar.warp.sync":
            return warp
        raise NotImplementedError(x.text)

    def _shfl(self, x: Instruction) -> Step:
        target, _, predicate = x.operands[0].partition("|")
        a, b, c = (self.operand(text, TYPES["u32"]) for text in x.operands[1:4])
        mode = x.opcode.split(".")[2]

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            by, clamp, segment = b(w).astype(int), c(w).astype(int) & 31, c(w).astype(int) >> 8 & 31
            first, last = LANES & segment, (LANES & segment) | (clamp & ~segment)
            source = {
                "bfly": LANES ^ by, "idx": first | (by & ~segment), "up": LANES - by, "down": LANES + by,
            }[mode]  # fmt: skip
            inside = source >= last if mode == "up" else source <= last
            w.write(target, a(w)[np.where(inside, source, LANES)], mask)
            if predicate:
                w.write(predicate, inside, mask)

        return step

    def _ldmatrix(self, x: Instruction) -> Step:
        """Load or store 1 to 4 matrices of 8 x 8 16-bit elements; lane 8 i + r has the address of row r."""
        load, transposed = x.opcode.startswith("ld"), ".trans." in x.opcode
        registers, place = x.operands if load else x.operands[::-1]
        names, address = elements(registers), self.address(place)
        reads = [self.operand(n, TYPES["u32"]) for n in names]
        row, element = LANES // 4, LANES % 4 * 2  # of a lane's two elements, which it is said to access

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            memory, access, starts = w.block.memory["shared"], w.access(None), address(w)
            memory.offsets(starts[: 8 * len(names)], 16)
            for i, name in enumerate(names):
                rows = starts[8 * i : 8 * i + 8]
                places = [rows[row] + 2 * (element + j) for j in (0, 1)]
                if transposed:
                    places = [rows[element + j] + 2 * row for j in (0, 1)]
                if load:
                    low, high = (memory.load(p, 2, 1, access)[0] for p in places)
                    w.write(name, low | high.astype(np.uint32) << 16, mask)
                else:
                    value = reads[i](w)
                    memory.store(places[0], [(value & 0xFFFF).astype(np.uint16)], 2, access)
                    memory.store(places[1], [(value >> 16).astype(np.uint16)], 2, access)

        return step

    _stmatrix = _ldmatrix

    def _vote(self, x: Instruction) -> Step:
        read, negated = self.operand(x.operands[1].lstrip("!"), TYPES["pred"]), x.operands[1][0] == "!"
        if x.opcode != "vote.sync.any.pred":
            raise NotImplementedError(x.text)

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            w.write(x.operands[0], np.full(32, (read(w) ^ negated).any()), mask)

        return step

    def _redux(self, x: Instruction) -> Step:
        _, _, name, kind = x.opcode.split(".")
        reduce = {"max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce}[name]
        read = self.operand(x.operands[1], TYPES[kind])

        def step(w: Warp, mask: Mask) -> None:
            w.together(mask)
            w.write(x.operands[0], bits(np.full(32, reduce(read(w)), TYPES[kind]), np.dtype("u4")), mask)

        return step


def elements(operand: str) -> list[str]:
    """The registers of a vector operand."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def bits(value: Array, to: DType) -> Array:
    """A value in the unsigned type of a register: its bits, extended by the value's sign or cut."""
    if value.dtype == to:
        return value
    if value.dtype.itemsize == to.itemsize:
        return value.view(to)
    if value.dtype.kind == "f":
        value = value.view(f"u{value.dtype.itemsize}")
    return value.astype(f"{value.dtype.kind}{to.itemsize}").view(to)
