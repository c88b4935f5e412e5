"""Validates the curve fit by simulation: coverage of its intervals, its errors and its speed."""
