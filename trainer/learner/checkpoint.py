"""Checkpoints: a Hugging Face folder plus what a resume needs, written atomically.

model.safetensors config.json tokenizer.json ...   AutoModelForCausalLM.from_pretrained reads it
adapter/          with LoRA: the adapters alone, for peft; the model above has them merged
state/            weights and AdamW's state of policy and critic, version and random state, by
                  torch.distributed.checkpoint: each rank writes its shards, and any number can read them
controller.json   the controller's state, from which main.py resumes
checksums.json    of all these files
"""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.config import ConfigError
from trainer.learner.lora import AdaptedWeight
from trainer.learner.optimizer import MOMENTS, ShardedAdamW
from trainer.learner.ranks import Ranks
from trainer.learner.sharding import as_dtensor, full_tensor, local_shard
from trainer.models.lora import Adapter, write_adapter
from trainer.run_folder import checkpoints, kept_at, write_checksums

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMED = {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.WindowsPath"}
_NAMED |= {"torch.distributed.checkpoint.filesystem._StorageInfo", "collections.OrderedDict"}
_NAMED |= {
    f"{_METADATA}.{name}"
    for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip


class _Reader(dcp.FileSystemReader):
    """Reads checkpoints of unknown origin: torch's own reader unpickles whatever `.metadata` names."""

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The metadata that torch would read, if it describes tensors only; else ConfigError."""
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            try:
                metadata: Metadata = _Unpickler(file).load()
                if any(
                    not isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values()
                ):
                    raise UnpicklingError("it describes more than tensors")  # torch would unpickle that, too
                if any("/" in info.relative_path for info in metadata.storage_data.values()):
                    raise UnpicklingError("it names a file outside")
            except Exception as e:  # whatever a hostile or broken file leads to
                raise ConfigError(f"{path}: {e}; expected tensors of a checkpoint: it is not used") from e
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle._Unpickler):
    """Builds what describes tensors, and nothing that could act."""

    dispatch: ClassVar[Any] = dict(pickle._Unpickler.dispatch)  # typeshed leaves out what follows

    def load_build(self) -> None:
        """Set attributes of an object, but not of a class or function, which others would then use."""
        changed = self.stack[-2]  # type: ignore[attr-defined]  # see above
        if not type(changed).__module__.startswith("torch.distributed.checkpoint."):
            raise UnpicklingError(f"it changes {changed!r}")
        super().load_build()  # type: ignore[misc]  # see above

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """A data class of torch's metadata, a dtype, a path."""
        named = f"{module}.{name}"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (dtype or named in _NAMED):
            raise UnpicklingError(f"it names {named}")
        return super().find_class(module, name)


def save(
    path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Tensor | AdaptedWeight], networks: Mapping[str, ShardedAdamW], version: int,
    controller_state: dict[str, Any], ranks: Ranks, adapter: Adapter | None = None,
) -> None:  # fmt: skip
    """Write a temporary folder, then rename it; a failure leaves older checkpoints as they are.

    All ranks write into one folder, which several machines must share.
    """
    final = Path(path)
    temporary = final.with_name(f".{final.name}.part")
    try:
        if not ranks.rank:
            shutil.rmtree(temporary, ignore_errors=True)  # a killed process left it
            temporary.mkdir(parents=True)
        ranks.gather(None)  # wait until the folder exists
        state = _state(networks, version)
        dcp.save(state, checkpoint_id=temporary / "state", no_dist=ranks.mesh is None)
        full = {}
        for name, weight in weights.items():
            tensor = full_tensor(weight, weight.dtype)
            if not ranks.rank:
                full[name] = tensor.cpu()
        if not ranks.rank:
            model.save_pretrained(temporary, state_dict=full)
            tokenizer.save_pretrained(temporary)
            if adapter is not None:
                write_adapter(temporary / "adapter", adapter)
            (temporary / "controller.json").write_text(json.dumps(controller_state))
            write_checksums(temporary)
            shutil.rmtree(final, ignore_errors=True)  # an older one of the same version
            temporary.rename(final)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as e:  # of any rank
        cause = _cause(e)
        if _no_space(e) or isinstance(cause, OSError):
            why = "no space left for" if _no_space(e) else f"cannot write ({cause})"
            advice = "free space" if _no_space(e) else "fix that"
            raise ConfigError(
                f"{why} the checkpoint {final}; older ones are whole: {advice}, then --resume"
            ) from e
        if cause is not e:
            raise RuntimeError(f"the checkpoint {final} failed: {cause}") from e
        raise
    finally:
        if not ranks.rank:
            shutil.rmtree(temporary, ignore_errors=True)


def load(path: str | Path, networks: Mapping[str, ShardedAdamW], ranks: Ranks) -> int:
    """Restore weights, the optimizers' moments and the random state; returns the version.

    The optimizers' settings stay as they are, since a resume may change them.
    """
    folder = Path(path) / "state"
    saved = _Reader(folder).read_metadata().state_dict_metadata
    if missing := [name for name in networks if name != "policy" and f"{name}.steps" not in saved]:
        raise ConfigError(
            f"{path}: the checkpoint holds no {', '.join(missing)}; resume with the objective.critic.body of "
            "the run, or start a new one"
        )
    expected = {f"weights.{name}": w.shape for name, w in networks["policy"].weights.items()}
    if {n: getattr(m, "size", None) for n, m in saved.items() if n.startswith("weights.")} != expected:
        raise ConfigError(
            f"{path}: the checkpoint holds other trained weights than this run's; expected those of its "
            "model.path and model.lora: go on with the run's, or start a new run with it as model.path"
        )
    state = _state(networks, 0)
    by_network = {name: state if name == "policy" else state[name] for name in networks}
    for name, tensors in by_network.items():
        if (f"{name}.scale" if name != "policy" else "scale") not in saved:  # it was no float16 run
            tensors.pop("scale", None)
    try:
        dcp.load(state, storage_reader=_Reader(folder), no_dist=ranks.mesh is None)
    except CheckpointException as e:
        raise ConfigError(f"{folder}: cannot be read: {_cause(e)}") from e
    for name, network in networks.items():
        tensors = by_network[name]
        for i, (weight, parameter) in enumerate(zip(network.weights, network.parameters, strict=True)):
            moments = {moment: local_shard(tensors[moment][weight]) for moment in MOMENTS}
            network.adamw.state[parameter] = {"step": tensors["steps"][i].to(parameter.device), **moments}
    torch.set_rng_state(state["rng"])
    return int(state["version"])


def _state(networks: Mapping[str, ShardedAdamW], version: int) -> dict[str, Any]:
    """The contents of a checkpoint: the tensors to write, or to read into. The policy's are at the top."""
    by_name = {name: _network_state(network) for name, network in networks.items()}
    state = {"version": torch.tensor(version), "rng": torch.get_rng_state()}
    return by_name.pop("policy") | by_name | state


def _network_state(network: ShardedAdamW) -> dict[str, Any]:
    """Moments are 0 before the first step."""
    weights, parameters = network.weights, network.parameters
    states = [network.adamw.state.get(parameter, {}) for parameter in parameters]

    def moments(moment: str) -> dict[str, Tensor]:
        shards = [s[moment] if s else torch.zeros_like(p) for s, p in zip(states, parameters, strict=True)]
        return {n: as_dtensor(m.detach(), w) for (n, w), m in zip(weights.items(), shards, strict=True)}

    return {
        "weights": {name: w.detach() for name, w in weights.items()},
        **{moment: moments(moment) for moment in MOMENTS},
        "steps": torch.tensor([float(s.get("step", 0)) for s in states]),
        **({"scale": network.scale.state} if network.scale.dynamic else {}),
    }


def _cause(error: BaseException) -> BaseException:
    """The error on the first rank that failed. torch's own exception is none of Python's `Exception`s."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _no_space(error: BaseException) -> bool:
    """True if the disk was full, by the OS's error code or the messages of safetensors and torch.save."""
    full = (errno.ENOSPC, errno.EDQUOT)
    messages = (*(os.strerror(code) for code in full), "PytorchStreamWriter failed writing")
    return getattr(error, "errno", None) in full or any(m in str(error) for m in messages)


def prune(run_dir: str | Path, keep: int) -> None:
    """Delete all but the newest `keep` and those kept for good, and incomplete ones of a killed process."""
    folders = [folder for folder in checkpoints(run_dir) if not kept_at(folder)]
    for old in folders[: max(0, len(folders) - keep)]:
        shutil.rmtree(old)
    for temporary in (Path(run_dir) / "checkpoints").glob(".step-*"):
        shutil.rmtree(temporary, ignore_errors=True)
