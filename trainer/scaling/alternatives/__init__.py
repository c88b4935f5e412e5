"""Other ways to fit a curve, kept for comparison with ours; the fit itself never imports them."""
