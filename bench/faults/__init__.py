"""Faults on purpose: whatever is killed, frozen or full, a run recovers or ends in one clear line."""
