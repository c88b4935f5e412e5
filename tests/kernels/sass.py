"""The control flow of a kernel's machine code, from cuobjdump's listing: what a GPU executes for a tile."""

import heapq
import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][A-Z0-9_.a-z]+)([^;]*);", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that are executed one after another."""

    mnemonics: tuple[str, ...]
    successors: tuple[int, ...]  # indices of the blocks that may follow


def blocks(listing: str) -> list[Block]:
    """The basic blocks of the only kernel in `listing`."""
    code = [(int(at, 16), guard, name, rest) for at, guard, name, rest in INSTRUCTION.findall(listing)]
    index = {at: i for i, (at, *_) in enumerate(code)}
    follows: dict[int, tuple[int, ...]] = {}  # after a jump: indices of the instructions that may follow
    for i, (_, guard, name, rest) in enumerate(code):
        if name.split(".")[0] in ("BRA", "EXIT"):
            label = re.findall(r"0x([0-9a-f]+)", rest)
            conditional = bool(guard) or bool(re.search(r"!?U?P\d", rest))
            follows[i] = tuple(index[int(x, 16)] for x in label[-1:]) + (i + 1,) * conditional
    starts = sorted({0, *(i + 1 for i in follows), *(j for f in follows.values() for j in f)} - {len(code)})
    number = {i: n for n, i in enumerate(starts)}
    return [
        Block(
            tuple(name for _, _, name, _ in code[start:end]),
            tuple(number[i] for i in follows.get(end - 1, (end,)) if i in number),
        )
        for start, end in zip(starts, [*starts[1:], len(code)], strict=True)
    ]


def instructions_outside_products(listing: str, unit: str) -> int:
    """A tile's instructions outside of the inner loop: from its last product by the exps to the next.

    `unit` is the mnemonic of the tensor cores' instructions. The shortest way leaves out what most tiles
    skip. The shortest way from product to product, one step of the inner loop, is subtracted.
    """
    graph = blocks(listing)
    exps = [sum(name == "MUFU.EX2" for name in block.mnemonics) for block in graph]
    costs = []
    for product in (
        i for i, b in enumerate(graph) if any(name.split(".")[0] == unit for name in b.mnemonics)
    ):
        after, step = lengths(graph, product), lengths(graph, product).get(product)
        for epilogue in (i for i in after if exps[i] == max(exps)):
            back = lengths(graph, epilogue).get(product)
            if back is not None and step is not None:
                costs.append(after[epilogue] + back - step)
    return max(costs)


def instructions_in_loop(listing: str, name: str = "MUFU.EX2") -> int:
    """Those of one round of the loop with the most of these instructions, by the shortest way."""
    graph = blocks(listing)
    rounds = [(b.mnemonics.count(name), lengths(graph, i).get(i)) for i, b in enumerate(graph)]
    most = max(n for n, length in rounds if length)
    return min(length for n, length in rounds if length and n == most)


def lengths(graph: list[Block], start: int) -> dict[int, int]:
    """The number of instructions from the end of a block to the end of each that can be reached, at least."""
    found: dict[int, int] = {}
    queue = [(0, start, True)]
    while queue:
        length, block, first = heapq.heappop(queue)
        if not first:
            if block in found:
                continue
            found[block] = length
        for follower in graph[block].successors:
            if follower not in found:
                heapq.heappush(queue, (length + len(graph[follower].mnemonics), follower, False))
    return found
