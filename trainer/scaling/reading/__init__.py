"""Reads runs: our run folders, and the logs of other trainers."""
