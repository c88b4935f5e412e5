"""Where models come from: a folder, the hub, or one of the two that are built in."""
