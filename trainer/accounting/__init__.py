"""A run's compute by use: device-hours by state, FLOPs, MFU, and the price of the loss of the LM head."""
