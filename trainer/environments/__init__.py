"""Environments that the model acts in over several turns: a process an episode, and what their turns add."""
