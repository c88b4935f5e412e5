"""Verifiers decide whether a completion solves its prompt: a class a kind, and a pool of workers."""
