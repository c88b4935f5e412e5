"""The built-in kinds of verifiers, a module each. Adding a module here adds the kind (docs/rewards.md)."""
