"""The Triton backend: the row work and the GEMM epilogues on CUDA, or on the CPU under TRITON_INTERPRET=1.

Nothing here imports Triton until `kernels.triton.backend` is imported.
"""
