"""A local page of runs while they train: curve, metrics, processes, and every rollout in their journals."""
