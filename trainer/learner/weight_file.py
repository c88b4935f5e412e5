"""New weights for the engines as files: one safetensors file a version, in shared memory if it has room.

A file has two names, `buffer-` and `version-`. The reader copies the tensors and deletes the version; once it
has, the buffer is written again for a later version, since new pages cost more time than the copy itself.
The folder is locked by its process: `run_folder.sweep` removes folders whose owner is dead.

From a GPU the weights are copied into pinned memory, which the learner does not wait for, and a thread writes
that copy while the next step runs: one version at a time.
"""

import atexit
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from trainer import run_folder
from trainer.config import ConfigError
from trainer.learner.lora import AdaptedWeight
from trainer.learner.sharding import full_tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BLOCK = 256 << 20  # bytes of a pinned block: a power of two, to which torch rounds them up


class WeightFiles:
    """Writes weights of `size` bytes as `dtype`; up to `files` files exist at the same time.

    With `behind`, a thread writes the files, and calls it with a file's path and an empty text once that is
    complete, or with the error's.
    """

    def __init__(
        self, run_dir: str, size: int, files: int, dtype: torch.dtype,
        behind: Callable[[str, str], None] | None = None, metadata: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.dtype, self.behind, self.note, self._metadata = dtype, behind, "", metadata
        self._buffers: list[Path] = []
        self._blocks: list[Tensor] = []  # the copy that the thread writes
        self._writer: Thread | None = None
        run_folder.sweep(Path(run_dir))  # before free space is measured
        shared = run_folder.SHARED
        free = shutil.disk_usage(shared).free if shared.is_dir() else 0
        fits = free > size * files
        if not fits:
            self.note = f"new weights go through files in {run_dir}, not shared memory: {shared} has "
            self.note += (
                f"{free / 2**30:.1f} GiB free, and {files} files of {size / 2**30:.1f} GiB may be needed"
            )
        self.folder, self._lock = run_folder.own_folder(shared if fits else Path(run_dir))
        atexit.register(self.close)

    def write(self, weights: Mapping[str, Tensor | AdaptedWeight], version: int) -> str:
        """Write an unused buffer, then link it under the version's name; returns that path, which exists from
        then on.

        Weights may be sharded: each is gathered, in order, and the other ranks must gather them as well.
        """
        path = self.folder / f"version-{version:06d}.safetensors"
        header = _header(weights, self.dtype, self._metadata)
        if self.behind is None:
            self._publish(path, header, (_bytes(w, self.dtype).cpu() for w in weights.values()))
        else:
            self._join()
            parts, copied = self._copy(weights)
            self._writer = Thread(target=self._write_behind, args=(path, header, parts, copied), daemon=True)
            self._writer.start()
        return str(path)

    def close(self) -> None:
        """Remove the folder."""
        self._join()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def _publish(self, path: Path, header: bytes, parts: Iterable[Tensor]) -> None:
        buffer = next((b for b in self._buffers if b.stat().st_nlink == 1), None)
        try:
            if buffer is None:
                buffer = self.folder / f"buffer-{len(self._buffers)}"
                buffer.touch()
                self._buffers.append(buffer)
            _write(buffer, header, parts)
            path.hardlink_to(buffer)
        except OSError as e:
            raise ConfigError(
                f"cannot publish the weights to {self.folder}: {e.strerror}; free space there, then --resume"
            ) from e

    def _copy(
        self, weights: Mapping[str, Tensor | AdaptedWeight]
    ) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """A copy of the weights' bytes in blocks, and the event that it is complete. On a GPU it comes
        before what changes the weights next, in the order of the stream."""
        end, copied = 0, None
        for weight in weights.values():
            remaining = _bytes(weight, self.dtype)
            if remaining.is_cuda and copied is None:
                copied = torch.cuda.Event()
            while len(remaining):
                block, offset = divmod(end, BLOCK)
                if block == len(self._blocks):
                    self._blocks.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=remaining.is_cuda))
                size = min(len(remaining), BLOCK - offset)
                self._blocks[block][offset : offset + size].copy_(remaining[:size], non_blocking=True)
                remaining, end = remaining[size:], end + size
        if copied is not None:
            copied.record()
        return [b[: end - i * BLOCK] for i, b in enumerate(self._blocks)], copied

    def _write_behind(
        self, path: Path, header: bytes, parts: list[Tensor], copied: torch.cuda.Event | None
    ) -> None:
        assert self.behind is not None
        problem = ""
        try:
            if copied is not None:
                copied.synchronize()
            self._publish(path, header, parts)
        except Exception as e:  # whatever it is: the controller waits for this file
            problem = str(e) or repr(e)
        self.behind(str(path), problem)


def _bytes(weight: Tensor | AdaptedWeight, dtype: torch.dtype) -> Tensor:
    """The whole weight's bytes in this type, where it is. A collective if it is sharded."""
    return full_tensor(weight, dtype).contiguous().view(-1).view(torch.uint8)


def _header(
    weights: Mapping[str, Tensor | AdaptedWeight], dtype: torch.dtype, metadata: Mapping[str, str] | None
) -> bytes:
    """The beginning of a safetensors file with these weights, in order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, w in weights.items():
        end = start + w.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(w.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data must start at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write(path: Path, header: bytes, parts: Iterable[Tensor]) -> None:
    """Write part by part, without a copy of the whole model."""
    with path.open("rb+", buffering=0) as file:
        file.write(header)
        for part in parts:
            view = part.numpy().data
            while view:
                view = view[file.write(view) :]
