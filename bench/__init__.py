"""Benchmarks: ours beside its peers and its limit, their errors against float64, and what it means in GPU-hours."""
