"""Promises of SECURITY.md that no other test holds: nothing of others is unpickled, no secret is written,
no port is open."""

import ast
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trainer.cli import fail, parse
from trainer.config import ConfigError
from trainer.learner.checkpoint import _Reader
from trainer.models.resolve import check_folder, resolve_model
from trainer.verifiers import judge_model

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("trainer", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))]


class Malice:
    """What executes a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


def test_pickle_is_used_for_cuda_handles_and_checked_metadata_only() -> None:
    """Pipes between the run's own processes pickle by themselves; nothing else may."""
    pickling = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    unsafe = re.compile(r"torch\.load\(|yaml\.(?:unsafe_)?load\(|allow_pickle|trust_remote_code")
    importing = set()
    for path in SOURCES:
        assert not unsafe.search(path.read_text()), path
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing |= {path.name for name in names if name.partition(".")[0] in pickling}
    assert importing == {"checkpoint.py", "weight_transfer.py"}


def test_models_are_loaded_from_safetensors_only(tmp_path: Path) -> None:
    for path in SOURCES:
        for call in re.split(r"AutoModel\w*\.from_pretrained\(", path.read_text())[1:]:
            assert "use_safetensors=True" in call[:200], path
    shutil.copytree(resolve_model("tiny"), tmp_path, dirs_exist_ok=True)
    check_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malice(tmp_path / "executed")))
    with pytest.raises(ConfigError, match=r"expected \*\.safetensors; pickled weights"):
        check_folder(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        judge_model.load(str(tmp_path), "cpu", "")
    assert not (tmp_path / "executed").exists()


def refuse(folder: Path) -> None:
    """Reading the description of this checkpoint is refused, and executes nothing."""
    with pytest.raises(ConfigError, match="expected tensors of a checkpoint: it is not used"):
        _Reader(folder).read_metadata()
    assert not list(folder.parent.glob("**/executed"))


def test_a_checkpoints_description_cannot_change_a_class(tmp_path: Path) -> None:
    """Found by a reviewer: dataclass() executes the names of the fields that such a change gives it."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def named(name: str) -> bytes:
        return f"ctorch.distributed.checkpoint.metadata\n{name}\n".encode()

    for function in ("dataclass", "StorageMeta"):
        field = f"a=__import__('os').system('touch {tmp_path}/executed')):#"
        state = b"N}" + text("__annotations__") + b"}" + text(field) + text("InitVar") + b"ss"
        state += text("__module__") + text("dataclasses") + b"s\x86b0"
        call = named(function) + named("StorageMeta") + b"\x85R."
        (tmp_path / ".metadata").write_bytes(b"\x80\x02" + named("StorageMeta") + state + call)
        refuse(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x02")  # cut off
    refuse(tmp_path)


@pytest.mark.parametrize("place", ["metadata", "an entry", "a file outside"])
def test_a_checkpoint_of_unknown_origin_executes_nothing(place: str, tmp_path: Path) -> None:
    malice = Malice(tmp_path / "executed")
    folder, target = tmp_path / "state", {"weights": {"w": torch.ones(3)}}
    dcp.save({"weights": {"w": torch.arange(3.0)}}, checkpoint_id=folder, no_dist=True)
    dcp.load(target, storage_reader=_Reader(folder), no_dist=True)
    assert target["weights"]["w"].tolist() == [0, 1, 2]
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(malice))
    elif place == "an entry":
        dcp.save({"weights": {"w": malice}}, checkpoint_id=folder, no_dist=True)
    else:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = "../elsewhere/" + info.relative_path
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse(folder)


SECRETS = {
    "--verifier.judge.url": "http://me:hunter2@judge:8000",
    "--engine.urls": "http://me:hunter2@node:8000",
    "--data.source": "https://host/data.jsonl?access_token=hunter2",
    "--model.path": "https://user:hunter2@host/model",
    "--data.options": "{storage_options: {aws_secret_access_key: hunter2}}",
    "--verifier.judge.model": "https://host/model?X-Amz-Security-Token=hunter2",
    "--verifier.judge.api_key_env": "sk-hunter2",
}


@pytest.mark.parametrize("key", SECRETS)
def test_a_secret_in_a_setting_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([key, SECRETS[key]])
    assert key.removeprefix("--") in str(caught.value) and "hunter2" not in str(caught.value)


def test_ordinary_settings_are_no_secrets() -> None:
    parse(["--data.source", "datasets:a/b", "--data.options", "{name: x, min_tokens: 3, tokenizer: t}"])
    parse(["--verifier.judge.api_key_env", "JUDGE_KEY", "--verifier.judge.url", "https://judge:8000/v1"])


def test_an_error_that_a_server_wrote_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail("HTTP 500 \x1b]0;owned\x07\x9b2J", 2) == 2
    assert capsys.readouterr().err == "error: HTTP 500 ·]0;owned··2J\n"


@pytest.mark.parametrize("source", ["datasets:../../x", "/a/../etc/b.jsonl", "datasets:..", "datasets:a/\0b"])
def test_a_runs_default_folder_is_one_of_runs(source: str) -> None:
    folder = Path(parse(["--data.source", source]).config.run_dir)
    assert folder.parent == Path("runs") and folder.name not in ("", ".", "..") and folder.name.isprintable()


RANK = """
import os, sys
from trainer.learner.ranks import init_ranks
ranks = init_ranks(60.0)
ranks.gather(None)
inodes = set()
for fd in os.listdir("/proc/self/fd"):
    try: inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").rstrip("]"))
    except OSError: pass
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and parts[9] in inodes: print(parts[1].partition(":")[0], flush=True)
ranks.gather(None)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="listening sockets are found in /proc")
def test_the_ranks_of_one_machine_listen_on_the_loopback_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"PYTHONPATH": str(ROOT), "LOCAL_RANK": "0"}
    command = [sys.executable, "-c", RANK]
    start = partial(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    ranks = [start(env=env | {"RANK": rank}) for rank in "01"]
    addresses = "".join(process.communicate(timeout=120)[0] for process in ranks).split()
    assert addresses and set(addresses) == {"0100007F"}  # 127.0.0.1
