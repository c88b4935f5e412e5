"""The embedded engine: continuous batching over a KV cache, in plain torch, in its own process."""
