"""The commands of `python -m trainer.scaling`, one module each."""
