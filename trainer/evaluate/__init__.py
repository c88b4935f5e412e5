"""`python -m trainer.evaluate`: scores models and checkpoints on held-out prompts, without training."""
