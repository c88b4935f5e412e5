"""The command `python -m trainer.engines.vllm_server`; see trainer/engines/vllm/server.py."""

from __future__ import annotations

from trainer.engines.vllm.server import main

if __name__ == "__main__":
    main()
