"""The command `python -m trainer.engines.vllm_server`; see trainer/engines/vllm/server.py."""

from trainer.engines.vllm.server import main

if __name__ == "__main__":
    main()
