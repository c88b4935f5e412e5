"""Verifiers: did this completion solve its prompt? Pure functions by kind, and a pool that can kill them."""
