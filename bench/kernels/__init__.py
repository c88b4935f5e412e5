"""Benchmarks of the fused loss: accuracy, memory and time, beside its peers."""
