"""Promises about PyPI's other `kernels`, which transformers looks for: no clash, or a clear message."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from trainer import doctor

HERE = Path(kernels.__file__).parents[1]
ADVICE = r"`kernels` 0.17.1 is installed.*pip uninstall kernels"


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own that looks for packages in `path` first."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "1000"}
    return subprocess.run([sys.executable, "-P", "-c", code], env=env, text=True, capture_output=True)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with the other distribution as pip leaves it: package, metadata, list of files."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel(): ...\n")
    info = tmp_path / "kernels-0.17.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.1\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\nkernels-0.17.1.dist-info/METADATA,,\n")
    return tmp_path


def test_transformers_does_not_take_our_kernels_for_the_other() -> None:
    from transformers.utils import is_kernels_available

    assert not is_kernels_available()


def test_no_version_of_ours_can_be_taken_for_a_version_of_the_other() -> None:
    # transformers asks for the version of whatever distribution holds `kernels`, which is sigmoid-rl's
    from packaging.version import Version
    from transformers.utils import import_utils

    lowest, above = Version(import_utils.KERNELS_MIN_VERSION), Version(import_utils.KERNELS_MAX_VERSION)
    ours = (importlib.metadata.version("sigmoid-rl"), getattr(kernels, "__version__", "0"))
    assert not any(lowest <= Version(version) < above for version in ours)


@pytest.mark.slow
def test_transformers_imported_first_finds_ours_and_leaves_it_alone() -> None:
    # every model file imports hub_kernels, whose probe may import `kernels`
    done = python("from transformers.integrations import hub_kernels; from kernels import policy_loss", HERE)
    assert done.returncode == 0, done.stderr


def test_importing_our_kernels_imports_neither_transformers_nor_the_trainer() -> None:
    done = python("import kernels, sys; print({'transformers', 'trainer'} & set(sys.modules))", HERE)
    assert done.stdout.strip() == "set()", done.stderr
    assert "Warning" not in done.stderr


def test_the_other_installed_is_a_clear_warning(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    assert doctor._name_clash().status == "ok"
    monkeypatch.syspath_prepend(str(other))
    with pytest.warns(UserWarning, match=ADVICE):
        kernels._warn_of_namesake()
    clash = doctor._name_clash()
    assert (clash.status, clash.advice, clash.required) == ("wrong", "pip uninstall kernels", True)


@pytest.mark.slow
def test_where_ours_hides_the_other_the_import_error_has_the_advice(other: Path) -> None:
    done = python("from transformers.integrations import hub_kernels", HERE, other)
    assert done.returncode != 0
    assert re.search(r"ImportError: .*CUDAProperties; `kernels` 0.17.1.*pip uninstall kernels", done.stderr)


def test_where_the_other_hides_ours_the_trainer_says_which_and_what_to_do(other: Path) -> None:
    done = python("import trainer.controller.batch", other, HERE)
    assert done.returncode != 0 and str(other / "kernels" / "__init__.py") in done.stderr
    assert "pip uninstall kernels" in done.stderr
