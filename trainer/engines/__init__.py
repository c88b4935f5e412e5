"""Engines generate completions: the protocol, the embedded torch engine, the process around it."""
