"""What only a GPU can show: its first ten minutes, and the suites of loss and learner."""
