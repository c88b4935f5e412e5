"""The folder of `model.path`, with config, safetensors and tokenizer: built-in, local or from the hub."""

import json
from pathlib import Path

from trainer.config import ConfigError
from trainer.models.cache import cache_folder
from trainer.models.smollm2 import smollm2

BUILT_IN = ("smollm2-135m", "tiny")
NAMES = " or ".join(BUILT_IN)
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


def resolve_model(path: str, *, cache: Path | None = None, key: str = "model.path") -> str:
    """A folder for AutoModelForCausalLM and AutoTokenizer; downloaded or converted where needed. `key`: the
    setting that names it, for errors."""
    cache = cache or cache_folder()
    if path == "smollm2-135m":
        return str(smollm2(cache))
    if path == "tiny":
        return str(Path(__file__).with_name("tiny_model"))
    local = Path(path).expanduser()
    if path and local.exists():
        check_folder(local, key)
        return str(local)
    if not path or path.startswith(("/", ".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{key} {path!r}: no such folder; give one, a hub name or {NAMES}")
    return _download(path, key)


def base_name(path: str, folder: str) -> str:
    """The name under which another program finds the model of `model.path`, which is in this folder."""
    return folder if path in BUILT_IN or Path(path).expanduser().exists() else path


def check_folder(folder: Path, key: str = "model.path") -> None:
    """ConfigError unless `folder` holds what a causal LM needs: config, weights, tokenizer."""
    where = f"{key} {folder}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: a file; expected a folder with config.json, weights and tokenizer")
    if not (folder / "config.json").is_file():
        advice = "give a model's folder"
        if (folder / "adapter_config.json").is_file():
            advice = "it holds an adapter: merge it first (python -m trainer.models.merge ADAPTER OUT)"
        raise ConfigError(f"{where}: no config.json in it; {advice}")
    try:
        config = json.loads((folder / "config.json").read_text())
        architectures = config.get("architectures") or []
    except (ValueError, AttributeError) as e:
        raise ConfigError(f"{where}: config.json is not a JSON object ({e}); download the model again") from e
    heads = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    if architectures and not any(name.endswith(heads) for name in architectures):
        raise ConfigError(f"{where}: a {architectures[0]}; expected a causal language model (...ForCausalLM)")
    if not any(folder.glob("*.safetensors")):
        advice = "; pickled weights (*.bin) can execute code: convert them" * any(folder.glob("*.bin"))
        raise ConfigError(f"{where}: no weights in it; expected *.safetensors{advice}")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{where}: no tokenizer in it; save one there with tokenizer.save_pretrained")


def _download(name: str, key: str) -> str:
    """The folder of the hub's model in the hub's own cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(name, allow_patterns=list(HUB_FILES))
    except errors.GatedRepoError as e:
        problem = "the hub asks for consent; accept its terms there, then `hf auth login`"
        raise ConfigError(f"{key} {name!r}: {problem}") from e
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as e:
        problem = f"neither a folder nor a hub name; built in are {NAMES}"
        raise ConfigError(f"{key} {name!r}: {problem}") from e
    except errors.LocalEntryNotFoundError as e:
        problem = "not a folder, not in the hub's cache, and the hub cannot be reached"
        raise ConfigError(f"{key} {name!r}: {problem}; give a folder, connect, or use {NAMES}") from e
    except OSError as e:
        problem = f"the hub's download failed ({e}); try again, or give a folder"
        raise ConfigError(f"{key} {name!r}: {problem}") from e
    check_folder(Path(folder), key)
    return str(folder)
