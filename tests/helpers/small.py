"""A run of seconds, as a user would start it: a random model of 16 characters, 40 prompts, 4 steps."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from forked import Forked
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from trainer.controller.journal import records
from trainer.jsonl import read_lines
from trainer.launcher import supervisor
from trainer.main import main

Begin = Callable[..., list[str]]  # the command of a run in a folder, with further flags: conftest.py
MAIN = [sys.executable, "-m", "trainer.main"]
CHARS = ["<eos>", "<pad>", *"0123456789+=\n "]


def make_model(folder: Path, seed: int = 0, mixture: bool = False) -> Path:
    """A random model and its tokenizer, in `folder`; or one of 2 of 16 experts."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(CHARS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True,
        "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True) if mixture else Qwen3Config(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_data(folder: Path) -> Path:
    """Sums of two digits, in `folder`."""
    path = folder / "digits.jsonl"
    rows = ({"question": f"{a}+{b}=", "answer": str(a)} for a in range(10) for b in range(4))
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


FLAGS = """
    --data.template={question} --data.held_out=8 --verifier.kind=tests_reward:first_digit_even
    --engine.max_new_tokens=8 --engine.stop=[] --objective.drop_truncated=false --learner.lr=1e-3
    --pipeline.steps=4 --pipeline.max_lag=1 --pipeline.prompts_per_step=4 --pipeline.completions_per_prompt=4
    --pipeline.no_positive_resampling=false --pipeline.deadline_s=60 --logging.checkpoint_every=0
    --evaluation.every=2 --evaluation.samples=2
"""


def command(model_dir: Path, data: Path, run_dir: Path, *more: str) -> list[str]:
    paths = [f"--run-dir={run_dir}", f"--model.path={model_dir}", f"--data.source={data}"]
    return [*MAIN, *paths, *FLAGS.split(), *more]


def environment(tmp: Path) -> dict[str, str]:
    (tmp / "tests_reward.py").write_text(
        "def first_digit_even(completion, answer, metadata):\n"
        "    digits = [c for c in completion if c.isdigit()]\n"
        "    return float(bool(digits) and int(digits[0]) % 2 == 0)\n"
    )
    path = os.pathsep.join([str(tmp), os.getcwd()])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(
    argv: list[str], tmp: Path, code: int = 0, main: Callable[[list[str]], int] = main
) -> tuple[str, str]:
    """Run the command to its end in this process, and check its exit code; returns stdout and stderr."""
    environment(tmp)
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        fork_roles(tmp, patch)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        ended_with = main(argv[len(MAIN) :])
    assert ended_with == code, err.getvalue()
    return out.getvalue(), err.getvalue()


def fork_roles(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Fork role processes from a server that has imported what they need, vLLM excepted: they start at once.

    They find modules in `folder`; their environment is that at the server's start.
    """
    patch.setattr(supervisor, "CONTEXT", forked.CONTEXT)
    patch.syspath_prepend(folder)


@contextmanager
def started(argv: list[str], tmp: Path) -> Iterator[Forked]:
    """The command's process, killed at the end of the block; it writes to out.log and err.log in `tmp`."""
    process = Forked(argv, tmp, environment(tmp))
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def started_anew(argv: list[str], tmp: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The same as a user starts it: a new interpreter, and one for each role, its children."""
    with (tmp / "out.log").open("w") as out, (tmp / "err.log").open("w") as err:
        process = subprocess.Popen(argv, env=environment(tmp), stdout=out, stderr=err, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()


def until(holds: Callable[[], Any], process: subprocess.Popen[Any] | Forked, seconds: float = 90) -> None:
    """Wait; the test fails if the process ends or the time is over."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run did not get going"
        time.sleep(0.2)


def metrics(run_dir: Path, key: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have the key; none before there is the file."""
    path = run_dir / "metrics.jsonl"
    return [row for row in read_lines(path) if key in row] if path.exists() else []


def steps(run_dir: Path, key: str = "learner/loss") -> list[int]:
    return [row["step"] for row in metrics(run_dir, key)]


def check_no_group_is_lost(run_dir: Path) -> None:
    """Every batch begins with the group after the last one of the batch before."""
    batches = [(r["first"], r["last"]) for r in records(run_dir / "journal") if "trained" in r]
    assert [first for first, _ in batches] == [0, *(last + 1 for _, last in batches[:-1])]


def learned(run_dir: Path) -> tuple[dict[int, float], dict[str, bytes]]:
    """The losses by step, and the weights of the last checkpoint."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    losses = {row["step"]: row["learner/loss"] for row in metrics(run_dir, "learner/loss")}
    weights = load_file(newest / "model.safetensors")
    return losses, {name: array.tobytes() for name, array in weights.items()}
