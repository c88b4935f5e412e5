"""Measurements that need a GPU: its first ten minutes, and the suites of loss and learner."""
