"""Rows whose logits the loss holds at a time on CUDA; without torch, for who plans its memory."""

CUDA_CHUNK_ROWS = 8192  # at least: each chunk reads and writes dW's FP32 sum, 8VH bytes: few, large chunks


def cuda_chunk_rows(free: float, vocabulary: int, hidden: int, number: int = 4) -> int:
    """A multiple of CUDA_CHUNK_ROWS whose logits take at most half of `free` bytes, once dW has its own.

    A logit takes `number` bytes: 4, or 2 where only bf16 gradients are stored.
    """
    half = (free - 8 * vocabulary * hidden) / 2
    return max(1, int(half / (number * vocabulary)) // CUDA_CHUNK_ROWS) * CUDA_CHUNK_ROWS
