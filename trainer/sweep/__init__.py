"""Sweeps: recipes × seeds on one task, each run a process of `python -m trainer.main`, and what they show."""
