"""Simulates how fast a split of the devices trains, and checks the simulation against real runs."""
