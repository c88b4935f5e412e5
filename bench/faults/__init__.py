"""Trials of runs under faults: processes that die, full disks, hostile answers."""
