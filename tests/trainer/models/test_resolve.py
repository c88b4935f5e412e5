"""Promises of model.path: every refusal is one line that names the path and what is wrong."""

import shutil
from pathlib import Path

import pytest

from trainer.config import ConfigError
from trainer.models.resolve import resolve_model


def test_a_local_folder_is_taken_as_it_is(tiny_model_dir: Path) -> None:
    assert resolve_model(str(tiny_model_dir)) == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "no config.json"),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
        ("config.json", "{", "not a JSON object"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"architectures": ["BertModel"]}', "BertModel"),
    ],
)
def test_a_folder_that_lacks_a_part_or_is_no_causal_lm_is_refused_by_its_name(
    tiny_model_dir: Path, tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / file).unlink() if content is None else (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        resolve_model(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


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
