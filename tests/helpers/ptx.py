"""PTX of Triton kernels, run block by block in NumPy: warps interleave at random between barriers.

Lanes of a warp run together; where they part, those behind run first. What is not known here raises
NotImplementedError, and what PTX leaves undefined PTXError.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ptx_memory import Access, Array, Memory, PTXError
from ptx_ops import DType
from ptx_tasks import Groups, MBarrier, Task, TensorMap

Mask = Array | None
Step = Callable[["Warp", Mask], None]
LANES = np.arange(32)
ALL = np.ones(32, bool)
"""The lanes of a warp that has not parted; others are another array."""
PARAMETERS, SHARED, GLOBAL = 1 << 40, 0, 1 << 41
"""Addresses where the kernel's arguments, shared memory and tensors begin."""


@dataclass(frozen=True, slots=True)
class Instruction:
    guard: str
    """Empty, or the predicate, after "!" where it is negated."""
    opcode: str
    operands: tuple[str, ...]
    text: str


@dataclass(slots=True)
class Kernel:
    """A parsed kernel."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, str] = field(default_factory=dict)
    """Type of each register that has a name, and of each prefix of numbered ones."""
    parameters: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and size of each argument, in bytes."""
    parameter_bytes: int = 0
    threads: int = 0
    steps: list[Step] = field(default_factory=list)
    """What each instruction does, once the kernel has been a program."""

    def places(self, *opcodes: str) -> list[int]:
        """Where instructions are in the code whose opcodes begin like one of these."""
        return [i for i, x in enumerate(self.code) if x.opcode.startswith(opcodes)]


def parse(ptx: str) -> Kernel:
    """The only kernel in a module. Labels of a block in braces are made unique."""
    kernel = Kernel()
    head, body = re.sub(r"//.*", "", ptx).split(".entry", 1)[1].split("{", 1)
    pattern = r"\.param (?:\.align (\d+) )?\.([a-z])(\d+)[^,)\[]*?(\w+)(?:\[(\d+)\])?\s*[,)]"
    for align, _, bits, name, count in re.findall(pattern, head):
        size = int(bits) // 8 * int(count or 1)
        at = -(-kernel.parameter_bytes // int(align or size)) * int(align or size)
        kernel.parameters[name], kernel.parameter_bytes = (at, size), at + size
    if threads := re.search(r"\.reqntid (\d+)", head):
        kernel.threads = int(threads[1])
    depth, blocks = 1, itertools.count()
    body = re.sub(r"\{[^{}]*\}", lambda block: _unique_labels(block[0], next(blocks)), body)
    for match in re.finditer(r"\s*(\{|\}|\$?\w+:(?!:)|\.(?:loc|pragma|section)[^\n;]*|[^;{}][^;]*;)", body):
        token = match[1]
        if token in "{}":
            depth += 1 if token == "{" else -1
            if not depth:
                break
        elif token.endswith(":"):
            kernel.labels[token[:-1]] = len(kernel.code)
        elif declared := re.match(r"\.reg \.(\w+)\s+(.*);", token):
            for register in declared[2].split(","):
                kernel.registers[register.strip().split("<")[0]] = declared[1]
        elif statement := re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*);", token, re.S):
            operands = tuple(_operands(statement[3]))
            text = re.sub(r"\s+", " ", token).strip()
            kernel.code.append(Instruction(statement[1] or "", statement[2], operands, text))
    return kernel


def _unique_labels(block: str, number: int) -> str:
    for label in re.findall(r"(?m)^\s*(\w+):(?!:)", block):
        block = re.sub(rf"\b{label}\b", f"{label}_{number}", block)
    return block


def _operands(text: str) -> Iterator[str]:
    """The operands, split at commas outside of brackets."""
    for part in re.findall(r"(?:\{[^}]*\}|\[(?:\{[^}]*\}|[^\]])*\]|[^,{\[])+", text):
        if part.strip():
            yield part.strip()


class Registers(dict[str, Array]):
    """Values (32,) of registers, unsigned or bool; random before they are written."""

    def __init__(self, width: Callable[[str], DType], rng: np.random.Generator) -> None:
        self.width, self.rng = width, rng
        self.loads: dict[str, Task] = {}
        """Loads that a read of these registers waits for."""

    def __missing__(self, name: str) -> Array:
        if name in self.loads:
            self.loads.pop(name).finish()
            return self[name]
        t = self.width(name)
        noise = self.rng.integers(0, 256, 32 * t.itemsize, np.uint8)
        self[name] = noise > 127 if t.kind == "b" else noise.view(t)
        return self[name]


class Warp:
    """The state of 32 lanes: registers as unsigned arrays (32,), and where the lanes are in the code."""

    def __init__(self, number: int, block: "Block") -> None:
        self.number, self.block = number, block
        self.registers = Registers(block.program.width, block.noise)
        self.at, self.active = 0, ALL
        self.parted: list[tuple[int, Array]] = []
        """Other groups of lanes that are elsewhere in the code."""
        self.waits = self.done = self.spins = False
        self.sync = 0
        self.groups = {"wgmma": Groups(), "bulk": Groups(), "copy": Groups(), "tensor": Groups()}

    def step(self) -> None:
        """Run the next instruction of the lanes that are furthest behind. Those at a `.sync` wait for all."""
        if self.parted:
            self._join()
        instruction, self.at = self.at, self.at + 1
        self.block.program.passed.add(instruction)
        try:
            self.block.steps[instruction](self, None if self.active is ALL else self.active)
        except PTXError as error:
            error.add_note(f"warp {self.number}: {self.block.kernel.code[instruction].text}")
            raise

    def _join(self) -> None:
        groups = [*self.parted, (self.at, self.active)]
        self.at = min((at in self.block.program.whole, at) for at, _ in groups)[1]
        lanes = np.logical_or.reduce([lanes for at, lanes in groups if at == self.at])
        self.active = ALL if lanes.all() else lanes
        self.parted = [(at, lanes) for at, lanes in groups if at != self.at]

    def together(self, mask: Mask) -> None:
        """PTXError unless all lanes take part, as instructions of a whole warp require."""
        if mask is not None:
            raise PTXError("a part of a warp")

    def write(self, register: str, value: Array, mask: Mask) -> None:
        if mask is not None:
            value = np.where(mask, value, self.registers[register])
        self.registers[register] = value

    def access(self, mask: Mask) -> Access:
        lanes = LANES if mask is None else np.flatnonzero(mask)
        return Access(self.block.number + 1, self.block.epoch, self.number, self.sync, lanes)


class Block:
    """A thread block at work."""

    def __init__(
        self, program: "Program", grid: tuple[int, ...], place: tuple[int, ...], memory: Memory,
        parameters: Memory, seed: int, epoch: int, races: bool,
    ) -> None:  # fmt: skip
        self.program, self.kernel, self.steps = program, program.kernel, program.steps
        self.number = place[0] + grid[0] * (place[1] + grid[1] * place[2])
        self.grid, self.place, self.epoch, self.seed = grid, place, epoch, seed
        self.noise = np.random.default_rng(seed)
        shared = Memory(program.shared, SHARED, self.noise, races)
        shared.valid[:] = True
        self.memory = {"global": memory, "shared": shared, "param": parameters}
        self.rng = random.Random(seed)
        self.warps = [Warp(i, self) for i in range(self.kernel.threads // 32)]
        self.mbarriers: dict[int, MBarrier] = {}
        self.arrived: dict[int, tuple[int, list[Warp]]] = {}
        """Of each barrier of the block: how many threads have come, and which warps wait."""
        self.copies: list[Task] = []
        """Copies that have started and report to an mbarrier."""
        self.tensor: Array | None = None
        """Tensor memory, when it has been allocated, and the products into it, first to last."""
        self.products: list[Task] = []

    def run(self) -> None:
        """Until all warps have ended. The schedule is one of four kinds, by the seed."""
        starved = self.rng.choice(self.warps) if self.seed % 4 == 3 else None
        while live := [w for w in self.warps if not w.done]:
            ready = [w for w in live if not (w.waits or w.spins)]
            if self.copies and self.seed % 3 == 2 and self.rng.random() < 0.2:
                self._copy()
            elif ready:
                self._turn(self.rng.choice([w for w in ready if w is not starved] or ready))
            elif self.copies:
                self._copy()
            else:
                raise PTXError("all warps wait, not all of them at a barrier of the block")
        for warp in self.warps:
            for groups in warp.groups.values():
                groups.commit()
                groups.wait(0)

    def _copy(self) -> None:
        """One of the copies is done."""
        self.copies.pop(self.rng.randrange(len(self.copies))).finish()
        self.wake()

    def _turn(self, warp: Warp) -> None:
        """Some steps of a warp, or all until it waits."""
        steps = {0: self.rng.randint(1, 60), 2: self.rng.randint(1, 3)}.get(self.seed % 4, 1 << 60)
        for _ in range(steps):
            warp.step()
            if warp.done or warp.waits or warp.spins:
                break

    def eager(self) -> bool:
        """True if what is asynchronous is to be done at once: by the seed always, never or at random."""
        return {0: True, 1: False}.get(self.seed % 3, self.rng.random() < 0.5)

    def start(self, copy: Task) -> None:
        self.copies.append(copy)
        if self.eager():
            self.copies.pop().finish()

    def arrive(self, barrier: int, threads: int, warp: Warp, waits: bool) -> None:
        """A warp comes to a barrier of so many threads; those that wait there go on when all have come."""
        arrived, waiting = self.arrived.get(barrier, (0, []))
        arrived, waiting, warp.waits = arrived + 32, [*waiting, *[warp] * waits], waits
        if arrived == threads:
            self.epoch += 1
            for other in waiting:
                other.waits = False
            arrived, waiting = 0, []
        self.arrived[barrier] = arrived, waiting

    def wake(self) -> None:
        """Let warps look again at mbarriers that were not ready."""
        for warp in self.warps:
            warp.spins = False

    def special(self, name: str, warp: Warp) -> Array:
        value: Any = {
            "%tid.x": 32 * warp.number + LANES, "%tid.y": 0, "%tid.z": 0, "%laneid": LANES,
            "%cluster_ctarank": 0, "%warpid": warp.number, "%ntid.x": self.kernel.threads,
            **{f"%ctaid.{x}": i for x, i in zip("xyz", self.place, strict=True)},
            **{f"%nctaid.{x}": i for x, i in zip("xyz", self.grid, strict=True)},
        }[name]  # fmt: skip
        return np.full(32, value, np.uint32)


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel that is ready to run."""

    kernel: Kernel
    shared: int
    """Bytes of shared memory."""
    steps: list[Step]
    width: Callable[[str], DType]
    """The type in which a register is held, unsigned or bool."""
    maps: dict[int, TensorMap]
    """The matrices whose descriptors are at these addresses."""
    whole: set[int]
    """The instructions that all lanes of a warp take part in."""
    passed: set[int] = field(default_factory=set)
    """The instructions that a warp came to."""

    def run(
        self, grid: tuple[int, int, int], arguments: bytes, memory: Memory, seed: int, races: bool = True
    ) -> None:
        """Run the blocks in random order."""
        parameters = Memory(self.kernel.parameter_bytes, PARAMETERS, None, False)
        parameters.bytes[: len(arguments)] = np.frombuffer(arguments, np.uint8)
        parameters.valid[:] = True
        places = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        random.Random(seed).shuffle(places)
        epoch = 1
        with np.errstate(all="ignore"):
            for place in places:
                block = Block(self, grid, place, memory, parameters, seed, epoch, races)
                block.run()
                epoch = block.epoch + 1
