"""Promises of weight files: the engines' type, whole or not at all, removed after the run's death."""

import errno
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import learner

from trainer import run_folder
from trainer.config import ConfigError
from trainer.learner import weight_file
from trainer.learner.weight_file import WeightFiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_published_weights_have_the_engines_dtype(model_dir: str, tmp_path: Path, dtype: torch.dtype) -> None:
    one = learner(model_dir)
    files = WeightFiles(str(tmp_path), 10**6, 2, dtype)
    path = files.write(one.weights, 7)
    written = load_file(path)
    assert written.keys() == one.weights.keys()
    assert all(torch.equal(written[name], w.detach().to(dtype)) for name, w in one.weights.items())
    files.close()
    assert not Path(path).exists()


def test_a_published_file_is_written_again_only_once_its_reader_has_deleted_it(tmp_path: Path) -> None:
    files = WeightFiles(str(tmp_path), 100, 2, torch.float32)
    first, second = (Path(files.write({"w": torch.full((5,), float(v))}, v)) for v in (1, 2))
    inodes = first.stat().st_ino, second.stat().st_ino
    assert inodes[0] != inodes[1]
    first.unlink()
    third = Path(files.write({"w": torch.full((5,), 3.0)}, 3))
    assert third.stat().st_ino == inodes[0]
    assert load_file(second)["w"].tolist() == [2] * 5 and load_file(third)["w"].tolist() == [3] * 5
    files.close()


def test_a_dead_runs_folder_is_swept_from_both_roots_and_a_living_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, run_dir = tmp_path / "shm", tmp_path / "run"
    shared.mkdir(), run_dir.mkdir()
    monkeypatch.setattr(run_folder, "SHARED", shared)
    alive = WeightFiles(str(run_dir), 1, 1, torch.float32)
    dead = [WeightFiles(str(run_dir), size, 1, torch.float32) for size in (1, 10**18)]
    assert [d.folder.parent for d in dead] == [shared, run_dir]
    assert not dead[0].note and "not shared memory" in dead[1].note
    for one in dead:
        one._lock.close()  # as its process's death would
    WeightFiles(str(run_dir), 10**18, 1, torch.float32).close()
    assert alive.folder.exists() and not any(d.folder.exists() for d in dead)
    alive.close()


def test_a_file_written_behind_the_next_step_has_the_weights_of_its_own_and_no_name_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "BLOCK", 7)  # weights that span several blocks
    may_write, done, write = threading.Event(), SimpleQueue[tuple[str, str]](), weight_file._write

    def slow(*args: Any) -> None:
        may_write.wait(30)
        write(*args)

    monkeypatch.setattr(weight_file, "_write", slow)
    files = WeightFiles(str(tmp_path), 100, 2, torch.bfloat16, lambda *file: done.put(file))
    weights = {"a": torch.arange(11.0), "empty": torch.zeros(0), "b": torch.full((2, 3), -1.0)}
    first = files.write(weights, 1)
    for w in weights.values():
        w += 100  # the next step
    assert done.empty() and not Path(first).exists()
    may_write.set()
    second = files.write(weights, 2)  # waits for the first
    assert done.get(timeout=30) == (first, "")
    assert load_file(first)["a"].tolist() == list(range(11)) and (load_file(first)["b"] == -1).all()
    assert done.get(timeout=30) == (second, "")
    assert load_file(second)["a"].tolist() == list(range(100, 111))

    def full(path: Path, *args: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_file, "_write", full)
    third = files.write(weights, 3)
    path, problem = done.get(timeout=30)
    assert path == third and "No space left" in problem and "--resume" in problem
    assert not Path(third).exists()
    files.close()
    at_once = WeightFiles(str(tmp_path), 100, 2, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cannot publish the weights to .*No space left"):
        at_once.write(weights, 4)
    assert not list(at_once.folder.glob("version-*"))
    at_once.close()
