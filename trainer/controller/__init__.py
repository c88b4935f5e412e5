"""The controller's process: prompts become rollouts, groups and batches; new weights reach the engines."""
