"""Benchmarks of the learner's step, beside a plain transformers loop."""
