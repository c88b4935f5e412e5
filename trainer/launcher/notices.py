"""Lines for the user about settings that are allowed and may not be meant."""

import importlib.util
from collections.abc import Iterator
from operator import attrgetter

from trainer.cli import Launch
from trainer.config import Config, ObjectiveConfig
from trainer.config.layers import FOLDERS
from trainer.config.objective import UNBOUND, losses_with
from trainer.gpus import visible_gpus, without_cuda
from trainer.launcher.memory_estimate import stays_on_cpu
from trainer.launcher.placement import without_judges


def _losses_with(key: str) -> list[str]:
    return [f"objective.loss {loss}" for loss in losses_with(key)]


SEQUENCE_MASKS = [f"objective.sequence_mask {kind}" for kind in ("product", "mean", "negative")]
PARTNERS = {  # by key, or start of keys: settings without one of which it has no effect
    "engine.max_new_tokens": ["engine.interruption.enabled False"],
    "pipeline.minibatches": ["pipeline.scheme ppo_off_policy"],
    "pipeline.max_lag": ["pipeline.scheme pipeline_rl"],
    "pipeline.npr_": ["pipeline.no_positive_resampling"],
    "forecast.patience": ["forecast.stop"],
    "curriculum.": ["curriculum.kind linear", "curriculum.kind exponential"],
    "curriculum.start": ["curriculum.by"],
    "verifier.length_penalty.": ["verifier.length_penalty.cache_tokens"],
    "learner.final_lr_share": ["learner.schedule cosine", "learner.schedule linear"],
    "objective.mask_": [*_losses_with("mask_low"), "objective.mismatch mask", *SEQUENCE_MASKS],
    "objective.max_ratio": [*_losses_with("max_ratio"), "objective.mismatch truncate"],
    "objective.resample_limit": ["objective.zero_variance resample"],
    "objective.global_std": ["objective.advantage_norm global"],
    "objective.std_over": ["objective.advantage_norm batch", "objective.advantage_norm running"],
    "objective.critic.": ["objective.critic.body own", "objective.critic.body shared"],
    "objective.kl.": ["objective.kl.coefficient"],
}


def notices(launch: Launch) -> Iterator[str]:
    """Settings of another task, values outside what a file recommends, what has no effect, idle GPUs."""
    config = launch.config
    yield from launch.notices
    for key, (name, least, greatest) in launch.recommended.items():
        value = attrgetter(key)(config)
        if value is not None and not least <= value <= greatest:
            yield f"{key} is {value}; {name} recommends {least} to {greatest}"
    if config.model.fp32_head != "both" and config.model.dtype == "float32":
        yield f"model.fp32_head {config.model.fp32_head} changes nothing: model.dtype is float32"
    yield from _without_effect(launch)
    yield from _bounds_of_another_loss(launch)
    objective, pipeline, warmup = config.objective, config.pipeline, config.learner.warmup_steps
    several = pipeline.off_policy and pipeline.lag_bound
    if (objective.anchor, objective.token_mismatch) == ("recomputed", "none") and not several:
        yield "objective.anchor recomputed: each ratio is 1 without ppo_off_policy of several steps a round"
    kl = objective.kl
    if (kl.estimator, kl.place, kl.top_k) == ("k1", "loss", 0) and kl.coefficient:
        yield "objective.kl.estimator k1 has no effect in the loss: its expected gradient is 0; use k2 or k3"
    if warmup >= pipeline.steps:
        yield f"learner.warmup_steps is {warmup}: the learning rate rises over all {pipeline.steps} steps"
    longest = config.engine.longest_completion()
    for penalty in {task.verifier.length_penalty for task in config.tasks.values()}:
        if penalty.cache_tokens and longest <= (start := penalty.max_tokens - penalty.cache_tokens):
            yield f"the length penalty begins at {start} tokens, and no completion is longer than {longest}"
    yield from _idle_gpus(config)


def _idle_gpus(config: Config) -> Iterator[str]:
    """The reasons why GPUs stay idle, or vLLM does not use them, or looks for one."""
    gpus, kind = len(without_judges(config, visible_gpus())), config.engine.kind
    if gpus and (version := without_cuda()):
        yield f"torch {version} is built without CUDA: {gpus} GPUs stay idle; install a CUDA build of torch"
    elif gpus and stays_on_cpu(config):
        small = f"model.path {config.model.path} is too small for a GPU, which would mostly wait for launches"
        yield f"{small}: the run stays on the CPU, and GPUs idle ({gpus}); --learner.ranks 1 takes one"
    elif gpus and kind != "vllm" and importlib.util.find_spec("vllm") is None:
        yield "vLLM is not installed: the torch engine generates; for long completions pip install '.[vllm]'"
    elif not gpus and kind == "vllm" and not config.engine.urls:
        place = "is left by the judges" if visible_gpus() else "on this machine"
        yield f"no GPU {place}: vLLM and the learner run on the CPU"


def _bounds_of_another_loss(launch: Launch) -> Iterator[str]:
    """Bounds that a file sets, where the command line names the loss."""
    chosen, objective = launch.origins.get("the command line", []), launch.config.objective
    usual = ObjectiveConfig(loss=objective.loss)
    for name in (name for name in UNBOUND if name in usual.loss_settings):
        key, bound, value = f"objective.{name}", getattr(usual, name), getattr(objective, name)
        if "objective.loss" in chosen and key not in chosen and value != bound:
            yield f"{key} {value} is a file's; of {objective.loss} it is {bound}, as --{key} null makes it"


def _without_effect(launch: Launch) -> Iterator[str]:
    """Settings without their partner: of the command line, or changed by a file of the user's own."""
    config, on_command_line = launch.config, launch.origins.get("the command line", [])
    shipped = {f"{kind} {path.stem}" for kind, folder in FOLDERS.items() for path in folder.glob("*.yaml")}
    in_files = [key for name in launch.origins.keys() - shipped for key in launch.origins[name]]
    continued = launch.resume or launch.branch or launch.replay
    changed = [k for k in in_files if not continued and attrgetter(k)(config) != attrgetter(k)(Config())]
    for start, partners in PARTNERS.items():
        wants = [partner.split() for partner in partners]
        met = any(str(attrgetter(k)(config)) in v if v else attrgetter(k)(config) for k, *v in wants)
        for key in sorted({*on_command_line, *changed} - {k for k, *_ in wants}):
            if key.startswith(start) and not met:
                yield f"{key} {attrgetter(key)(config)} has no effect: it needs {' or '.join(partners)}"
