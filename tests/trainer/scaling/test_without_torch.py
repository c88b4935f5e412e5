"""Promises of `pip install .`: the curve works without torch; what needs more names the extra to install."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulated import simulated, write

import trainer
from trainer.scaling import Sigmoid

ROOT = Path(trainer.__file__).parents[1]
BRINGS = {"numpy", "scipy", "matplotlib", "rich", "jinja2", "yaml"}
BLOCKED = """
import sys
MISSING = {"torch", "transformers", "vllm", "pandas", "tensorboard", "pyarrow", "safetensors", "gguf"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in MISSING else found(name, package)
import importlib.metadata
version = importlib.metadata.version
def installed(name):
    if name in MISSING:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = installed
"""


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`code` in a process in which the packages that `pip install .` does not bring are missing."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, A in (("a", 0.61), ("b", 0.50)):
        law = Sigmoid(R0=0.30, A=A, B=2.0, C_mid=2500)
        write(tmp_path / f"{name}.csv", simulated(law, np.linspace(500, 12_000, 24), 0.005, 1))
    return tmp_path


def test_it_fits_compares_predicts_and_reports_a_csv(folder: Path) -> None:
    code = """
from trainer.scaling.__main__ import main
for line in ("fit a.csv --json fit.json", "compare a.csv b.csv", "predict a.csv --at 24000",
             "report a.csv b.csv --out page.html"):
    assert main(line.split()) == 0, line
assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = python(code, folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "fit.json").read_text())["a.csv"]["identified"] is True
    assert "The ceilings differ" in done.stdout and "<html" in (folder / "page.html").read_text()


def test_a_file_that_needs_a_further_package_says_which_and_how_to_get_it(folder: Path) -> None:
    (folder / "x.parquet").write_bytes(b"PAR1")
    (folder / "events.out.tfevents.1").write_bytes(b"")
    code = "from trainer.scaling.__main__ import main; sys.exit(main(['fit', '{}']))"
    for name, package in (("x.parquet", "pyarrow"), ("events.out.tfevents.1", "tensorboard")):
        done = python(code.format(name), folder)
        assert done.returncode == 2
        assert done.stderr == f"error: {name}: to read it, {package} is missing: pip install '.[logs]'\n"


def test_training_without_torch_is_one_line_that_names_the_extra(folder: Path) -> None:
    done = python("from trainer.main import main; sys.exit(main(['--recipe', 'tiny']))", folder)
    assert (done.returncode, done.stderr) == (2, "error: torch is missing: pip install '.[train]'\n")
    done = python("from trainer import doctor; sys.exit(doctor.main())", folder)
    assert done.returncode == 1 and not done.stderr
    assert "Without torch, python -m trainer.scaling works" in done.stdout


def test_the_loss_without_torch_names_the_extra(folder: Path) -> None:
    done = python("from kernels import policy_loss", folder)
    assert "ImportError: sigmoid-rl's `kernels` needs torch" in done.stderr
    assert done.stderr.endswith("pip install '.[kernels]'\n")


def test_only_the_chosen_command_is_imported(folder: Path) -> None:
    code = """
from trainer.scaling.__main__ import main
main(["fit", "a.csv"])
late = ("matplotlib", "jinja2", "scipy.stats", "rich", "yaml", "trainer.scaling.commands.plan")
print([name for name in late if name in sys.modules])
"""
    assert python(code, folder).stdout.endswith("\n[]\n")


def test_setup_asks_for_torch_only_in_extras() -> None:
    text = (ROOT / "setup.py").read_text().partition("else:")[2].replace("TORCH", '"torch"')
    required, extras = text.partition("install_requires=[")[2].split("extras_require={")
    names = {re.match(r"[\w-]+", line.strip()[1:])[0] for line in required.splitlines() if '"' in line}  # type: ignore[index]
    assert {"yaml" if name == "pyyaml" else name for name in names} == BRINGS
    assert '"kernels": ["torch' in extras
    within = dict(re.findall(r'^ +"(\w+)": \[\s*"([^"]+)"', extras, re.MULTILINE))
    alone = {"logs": "tensorboard", "kernels": "torch", "train": "[logs,kernels]"}
    alone |= {"triton": "[kernels]", "hopper": "[kernels]"}
    assert all(alone.get(extra, "sigmoid-rl[train]") in first for extra, first in within.items())
    assert {"vllm", "test", *alone} <= within.keys()
