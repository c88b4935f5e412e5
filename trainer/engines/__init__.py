"""Engines generate completions: the protocol they share, the embedded torch engine, and vLLM."""
