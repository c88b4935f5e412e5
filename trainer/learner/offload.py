"""Takes a model's and an optimizer's memory off a GPU and brings it back, while engines use that GPU.

A storage is copied into pinned memory of the host and then shrunk to nothing. So every tensor that lies in it
stays the object it was: FSDP2's shards, the optimizer's parts of them, tied weights, AdamW's moments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """Copies in the host's memory, by storage; they are kept, since pinned memory is slow to get."""

    def __init__(self) -> None:
        self._host: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def away(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of these tensors; until `back` they may not be touched."""
        for storage in [t.untyped_storage() for t in tensors]:
            if storage.nbytes():  # else it is away: two tensors may share one
                key, pinned = storage._cdata, storage.device.type == "cuda"
                if key not in self._host:
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                    self._host[key] = storage, host
                self._host[key][1].copy_(_bytes(storage), non_blocking=True)
                storage.resize_(0)  # freed in the order of the stream: after the copy
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def back(self, tensors: Iterable[Tensor]) -> None:
        """Bring back those of these tensors that are away, with the bytes they had."""
        for storage in [t.untyped_storage() for t in tensors]:
            if not storage.nbytes() and storage._cdata in self._host:
                host = self._host[storage._cdata][1]
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
