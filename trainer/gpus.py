"""Which GPUs this process may use and how much memory they have, without importing torch."""

import os
import subprocess


def visible_gpus() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; empty without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(part.strip() for part in visible.split(",") if part.strip() not in ("", "-1"))
    listed = _nvidia_smi("-L")
    return tuple(str(i) for i, line in enumerate(listed) if line.startswith("GPU "))


def smallest_gpu_memory() -> float | None:
    """Memory in bytes of the smallest visible GPU; None where nvidia-smi does not report it."""
    rows = [
        [part.strip() for part in line.split(",")]
        for line in _nvidia_smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    ]
    gpus = [row for row in rows if len(row) == 3]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        names = visible_gpus()
        uuids = tuple(name for name in names if name.startswith("GPU-"))  # CUDA takes a UUID's first letters
        gpus = [row for row in gpus if row[0] in names or row[1].startswith(uuids)]
    mib = [float(row[2]) for row in gpus if row[2].isdecimal()]  # [N/A] if CPU and GPU share memory
    return min(mib) * 2**20 if mib else None


def _nvidia_smi(*arguments: str) -> list[str]:
    """The lines that nvidia-smi prints; none where it is missing or fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
