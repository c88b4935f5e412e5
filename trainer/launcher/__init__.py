"""The launcher's process: starts the other roles, watches them, and records what they report."""
