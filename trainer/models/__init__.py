"""Sources of models: a folder, the hub, or one of the two that are built in."""
