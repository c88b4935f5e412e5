"""The reinforcement-learning trainer: launcher, controller, engines, learner, ledger, curve."""
