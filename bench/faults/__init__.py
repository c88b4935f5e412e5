"""What must not stop a run, or be believed by it."""
