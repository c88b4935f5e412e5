"""Speed of a learner's step: FLOP/s, their share of what the card could do (MFU), and peak memory."""

import resource
import sys

import torch

# Dense bf16, in TFLOP/s, from NVIDIA's datasheets; the first name that a card's name contains counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "B200": 2250.0,
}


def peak_tflops(device: torch.device) -> float | None:
    """The device's bf16 peak; None: no datasheet of it is known here, or it is a part (MIG) of a card."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:
        return None
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def throughput(
    token_flops: int, tokens: int, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """`token_flops` a token, as in the run's FLOPs (accounting/flops.py), per second and device.

    What is computed twice to save memory does not count twice.
    """
    tflops = token_flops * tokens / seconds / ranks / 1e12
    return {"learner/tflop_per_s": tflops} | ({"learner/mfu": tflops / peak} if peak else {})


def peak_memory_gb(device: torch.device) -> float:
    """The most that this rank has held since it started: of a GPU's memory, or of the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
