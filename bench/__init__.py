"""Benchmarks: ours beside peers and the limit, errors against float64, and what it means in GPU-hours."""
