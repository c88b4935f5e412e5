"""The backend `triton`: CUDA, or the CPU under TRITON_INTERPRET=1.

This module can be imported without Triton; the functions of a `kernels.backends.Backend` then are missing.
"""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from . import quack
from .config import INTERPRET

if importlib.util.find_spec("triton") is not None:
    from . import fused, matmul
    from .fused import fused_epilogue, fused_score, score
    from .matmul import add_d_weight, d_hidden
    from .rows import row_grads, row_stats, single_pass
    from .split import split_16
    from .terms import has_terms, terms

    __all__ = ["add_d_weight", "d_hidden", "fused_epilogue", "fused_score", "has_terms", "score", "terms"]
    __all__ += ["row_grads", "row_stats", "single_pass"]


def logits(h: Tensor, weight: Tensor, out: Tensor) -> None:
    """out (C, V) FP32 = h Wᵀ: by cuBLAS on CUDA, by our kernel elsewhere.

    cuBLAS may sum in another order for another number of rows. Where a row's bits must not depend on that
    number, use `kernels.triton.fused.logits`.
    """
    (matmul.cublas_logits if h.is_cuda else fused.logits)(h, weight, out)


def prepare(hidden: Tensor, weight: Tensor, dtype: torch.dtype, parts: int) -> Tensor:
    """The weight for the other functions: (V, H), or (V, parts·H) bf16 beside bf16 hidden of another type.

    Other pairs of types are multiplied in FP32.

    ValueError on CPU tensors outside the interpreter, and on logits that are not float32.
    """
    if not (hidden.is_cuda or INTERPRET):
        raise ValueError(
            f"the triton backend was given tensors on {hidden.device}; expected CUDA tensors, or "
            "TRITON_INTERPRET=1 in the environment before Python starts"
        )
    if dtype != torch.float32:
        raise ValueError(f"the triton backend computes logits in float32; given inputs that need {dtype}")
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    if hidden.dtype == weight.dtype:
        return weight
    return split_16(weight.float(), parts) if hidden.dtype == torch.bfloat16 else weight.float()


def why_not() -> str:
    """The reason why the kernels cannot run here; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    if not (torch.cuda.is_available() or INTERPRET):
        return "no CUDA device is visible; on a CPU set TRITON_INTERPRET=1 before Python starts"
    return ""


def info() -> dict[str, Any]:
    """Versions, and the device on which the kernels run."""
    device = "CPU (interpreter)" if INTERPRET else torch.cuda.get_device_name()
    versions = {"triton": importlib.metadata.version("triton"), "torch": torch.__version__}
    return versions | {"quack": quack.why_not() or quack.VERSION, "device": device}
