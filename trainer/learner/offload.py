"""Memory that the learner keeps off a GPU while engines use that GPU."""

from collections.abc import Iterable

import torch


class Offload:
    """Moves memory off a GPU and back.

    A storage is copied into pinned host memory and then shrunk to zero bytes. So every tensor in it remains
    the same object: FSDP2's shards, the optimizer's views of them, tied weights, AdamW's moments. The host
    copies are kept, since pinned memory is slow to allocate.
    """

    def __init__(self) -> None:
        self._host: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these tensors to the host and free their memory; they cannot be used until `reload`."""
        for storage in [t.untyped_storage() for t in tensors]:
            if storage.nbytes():  # 0: already offloaded, as tensors may share a storage
                key, pinned = storage._cdata, storage.device.type == "cuda"
                if key not in self._host:
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                    self._host[key] = storage, host
                self._host[key][1].copy_(_bytes(storage), non_blocking=True)
                storage.resize_(0)  # freed in stream order, so after the copy
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def reload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy those of these tensors that are offloaded back into memory."""
        for storage in [t.untyped_storage() for t in tensors]:
            if not storage.nbytes() and storage._cdata in self._host:
                host = self._host[storage._cdata][1]
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
