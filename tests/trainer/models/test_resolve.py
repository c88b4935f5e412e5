"""Promises of model.path: every refusal is one line that names the path and what is wrong."""

import shutil
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.models.resolve import resolve_model


def test_a_local_folder_is_taken_as_it_is(tiny_model_dir: Path) -> None:
    assert resolve_model(str(tiny_model_dir)) == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused_by_its_name(
    tiny_model_dir: Path, tmp_path: Path, broken: str, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / broken).unlink()
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"architectures": ["BertModel"]}', "BertModel"),
    ],
)
def test_a_config_that_is_no_causal_lm_is_refused(
    tiny_model_dir: Path, tmp_path: Path, config: str, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "path", ["./no-such-folder", "/no/such/folder", "a/b/c", "", "no-such-org/no-such-model", "a b"]
)
def test_a_missing_model_is_one_clear_line(path: str) -> None:
    with pytest.raises(ConfigError, match=r"smollm2-135m or tiny") as error:
        resolve_model(path)
    assert "\n" not in str(error.value) and repr(path) in str(error.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ConfigError, match="a file"):
        resolve_model(str(tmp_path / "weights.gguf"))
