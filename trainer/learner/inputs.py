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

from trainer.learner.attention import FLASH_DTYPES, Layout, flash_kernel, layout
from trainer.learner.packing import MicroBatch

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inputs:
    """A micro-batch as body and loss take it: T input tokens, N loss tokens."""

    ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    rows: Tensor  # (N,)
    packed: Layout
    columns: Mapping[str, Tensor]  # (N,) each, or those of all ranks that share the head
    experts: Tensor | None = None  # (T, layers, k) ids to replay; −1: the router's own choice

    def to(self, device: torch.device) -> "Inputs":
        """The same on a device."""
        return self if device.type == "cpu" else self._map(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> "Inputs":
        """The same in memory from which copies to a GPU wait for nothing."""
        return self._map(Tensor.pin_memory)

    def _map(self, put: Callable[[Tensor], Tensor]) -> "Inputs":
        columns = {name: put(x) for name, x in self.columns.items()}
        experts = None if self.experts is None else put(self.experts)
        layout = self.packed.map(put)
        return Inputs(put(self.ids), put(self.positions), put(self.rows), layout, columns, experts)


def make_inputs(
    batch: MicroBatch, dtype: torch.dtype, device: torch.device, columns: Mapping[str, NDArray[Any]] = {},
    experts: Tensor | None = None,
) -> Inputs:  # fmt: skip
    """The tensors, in the host's memory, that a body in this type takes of a micro-batch on this device, and
    those of these columns of its loss tokens."""
    flash = device.type == "cuda" and dtype in FLASH_DTYPES and flash_kernel()[0] is not None
    ids, positions, rows = map(torch.from_numpy, (batch.input_ids, batch.position_ids, batch.rows))
    tensors = {name: torch.from_numpy(x) for name, x in columns.items()}
    inputs = Inputs(ids, positions, rows, layout(batch.segments, flash), tensors, experts)
    return inputs.pinned() if device.type == "cuda" else inputs


def prefetch(make: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """make(item) of each item in order; a thread makes the next one while the caller has the present one."""
    with ThreadPoolExecutor(1, "micro-batches") as thread:
        coming = [thread.submit(make, item) for item in items[:1]]
        for i in range(len(items)):
            result = coming.pop().result()
            coming += [thread.submit(make, item) for item in items[i + 1 : i + 2]]
            yield result
