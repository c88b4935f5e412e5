"""A micro-batch as tensors, made in the host's memory and copied to the device when it is computed.

On a GPU the host's copy is pinned, so that copying it waits for nothing, and a thread makes those of the next
micro-batch while the present one is computed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.learner.attention import Layout, layout
from trainer.learner.packing import MicroBatch

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What body and loss take of a micro-batch: T input tokens, N loss tokens."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    rows: Tensor  # (N,)
    packed: Layout
    columns: Mapping[str, Tensor]  # (N,) each, or those of all ranks that share the head

    def to(self, device: torch.device) -> "Inputs":
        """The same on a device."""
        if device.type == "cpu":
            return self

        def put(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        columns = {name: put(x) for name, x in self.columns.items()}
        return Inputs(put(self.ids), put(self.positions), put(self.rows), self.packed.map(put), columns)


def make_inputs(batch: MicroBatch, columns: Mapping[str, NDArray[Any]], flash: bool, pinned: bool) -> Inputs:
    """The tensors of a micro-batch and of these columns of its loss tokens, in the host's memory."""

    def host(x: Tensor) -> Tensor:
        return x.pin_memory() if pinned else x

    ids, positions, rows = (
        host(torch.from_numpy(x)) for x in (batch.input_ids, batch.position_ids, batch.rows)
    )
    tensors = {name: host(torch.from_numpy(x)) for name, x in columns.items()}
    return Inputs(ids, positions, rows, layout(batch.segments, flash).map(host), tensors)


def prefetch(make: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """make(item) of each item in order; a thread makes the next one while the caller has the present one."""
    with ThreadPoolExecutor(1, "micro-batches") as thread:
        coming = [thread.submit(make, item) for item in items[:1]]
        for i in range(len(items)):
            made = coming.pop().result()
            coming += [thread.submit(make, item) for item in items[i + 1 : i + 2]]
            yield made
