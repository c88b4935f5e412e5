"""Where a run's compute goes: device-hours by state, FLOPs, MFU, and the price of the loss of the LM head."""
