"""vLLM as an engine: in a process on this machine, or as a server on another."""
