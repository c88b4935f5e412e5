"""What every test stands on: no network, one torch thread, a small model, Triton's interpreter."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests spawn

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # before each test: commands that tests run set the number that they are given


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random 0.16 M Qwen3 and its character tokenizer."""
    from trainer.models.tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("tiny-random")
    make_model(seed=0).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
