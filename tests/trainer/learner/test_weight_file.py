"""Promises of weight files: the engines' type, whole or not at all, removed after the run's death."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import NoClock, config, make_model

from trainer import run_folder
from trainer.config import ConfigError
from trainer.learner import weight_file
from trainer.learner.learner import Learner
from trainer.learner.weight_file import WeightFiles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_the_models_in_the_engines_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    one = Learner(config(), make_model("tied", tmp_path / "model"), NoClock())  # type: ignore[arg-type]
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
    for one in dead:
        one._lock.close()  # as its process's death would
    WeightFiles(str(run_dir), 10**18, 1, torch.float32).close()
    assert alive.folder.exists() and not any(d.folder.exists() for d in dead)
    alive.close()


def test_a_full_disk_at_publishing_is_one_line_and_names_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = WeightFiles(str(tmp_path), 10**18, 1, torch.float32)  # more than shared memory holds
    assert files.folder.parent == tmp_path

    def full(path: Path, *args: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_file, "_write", full)
    with pytest.raises(ConfigError, match=r"cannot publish the weights to .*No space left"):
        files.write({"w": torch.ones(3)}, 1)
    assert not list(files.folder.glob("version-*"))
    files.close()
