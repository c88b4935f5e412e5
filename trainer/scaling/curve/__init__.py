"""The curve of one run: its families, their posterior, and the averaged forecast."""
