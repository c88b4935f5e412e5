"""`python -m trainer.doctor --numerics [FLAGS]`: how far learner and engine are apart, and why.

FLAGS are those of `trainer.main`. The engine samples completions of held-out prompts, the learner scores the
same tokens with the same weights, and nothing is trained. With d = log π_learner − log π_engine of N tokens:

    KL(engine ‖ learner) ≈ 1/N Σ (exp(d) − 1 − d)      Schulman, 2020, "Approximating KL Divergence" (k3)

It is printed by the tokens' positions and by their probabilities: what is rounded alike everywhere shows in
all rows, a wrong position or cache in late ones, a wrong head or temperature in those of unlikely tokens.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from trainer.cli import parse
from trainer.config import Config, ConfigError
from trainer.gpus import usable_gpus
from trainer.launcher.placement import Devices
from trainer.launcher.supervisor import NUMERICS, RoleDied, Supervisor
from trainer.mismatch import EDGES, PARITY_NATS, RANGES

Plan = Callable[[Sequence[str]], tuple[Config, str, Devices]]
PROMPTS, SAMPLES = 64, 4
LIKELY = (0.01, 0.1, 0.5)  # probabilities at which the next row begins
SLOPED = 0.7  # correlation of d and the log-prob from which it is taken for another temperature
GROWS = 3.0  # ratio of the gap at the last positions to that at the first, from which it depends on them
BY_PROBABILITY = ("below .01", ".01 to .1", ".1 to .5", ".5 to 1")
INVARIANT = "VLLM_BATCH_INVARIANT"  # vLLM then rounds alike whatever else is in the batch


def check(argv: Sequence[str], plan: Plan) -> int:
    """Compare learner and engine as `trainer.main` with these flags would start them. Exit code 0: they agree
    within the bound of the parity gate. ConfigError: wrong flags, or what keeps a run from starting.

    `plan`: configuration, model folder and devices of a run with such flags."""
    config, measured = None, dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="sigmoid-rl-numerics-") as folder:
        for setting in _settings(argv):
            config, data = _compare(plan([*argv, "--run-dir", f"{folder}/{setting or 'as-is'}"]), setting)
            measured[setting] = data
    assert config is not None
    bound = PARITY_NATS[config.model.dtype]
    for setting, data in measured.items():
        title = f"{INVARIANT}={setting}: " * bool(setting)
        _print(data, f"{title}{len(data['gap'])} tokens, {config.engine.kind} engine, {config.model.dtype}")
    mean = {setting: float(np.abs(data["gap"]).mean()) for setting, data in measured.items()}
    print(f"expected: mean |d| of at most {bound:g} in {config.model.dtype}")
    print("\n".join(advice(config, measured[""])))
    if len(mean) > 1 and mean["1"] < mean[""] / 2:
        print(f"{INVARIANT}=1 more than halves it: set it in the environment of trainer.main")
    return 0 if min(mean.values()) <= bound else 1


def _settings(argv: Sequence[str]) -> tuple[str, ...]:
    """Values of VLLM_BATCH_INVARIANT to try: both with vLLM on GPUs, unless the user has set one."""
    vllm = parse(argv).config.engine.kind == "vllm" and usable_gpus() and INVARIANT not in os.environ
    return ("", "1") if vllm else ("",)


def _compare(planned: tuple[Config, str, Devices], setting: str) -> tuple[Config, dict[str, Any]]:
    """The configuration as planned, and log-probs and positions of the sampled tokens."""
    config, model, devices = planned
    os.makedirs(config.run_dir)
    data: dict[str, Any] = {}

    def handle(role: str, message: object) -> str:
        kind, content = getattr(message, "kind", ""), getattr(message, "data", {})
        if kind == "numerics":
            data.update(content)
        elif kind in ("phase", "note"):
            print(f"{content.get('name') or content.get('text')} ...", flush=True)
        return ""

    if setting:
        os.environ[INVARIANT] = setting
    try:
        start = {"path": None, "prompts": PROMPTS, "samples": SAMPLES}
        Supervisor(config, model, devices, start, handle, NUMERICS).run()
    except RoleDied as e:
        problem = str(e).partition(" (traceback")[0]  # its file goes with the folder
        raise ConfigError(f"numerics: {problem}") from e
    finally:
        if setting:
            del os.environ[INVARIANT]
    return config, data


def _print(data: Mapping[str, Any], title: str) -> None:
    names = ("tokens", "count", "KL (nats)", "mean |d|", "max |d|")
    table = Table(*names, box=None, title=title, title_justify="left")
    for name, chosen in rows(data):
        d = data["gap"][chosen].astype(np.float64)
        cells = (kl(d), np.abs(d).mean(), np.abs(d).max())
        table.add_row(name, str(len(d)), *(f"{x:.2e}" for x in cells))
    Console().print(table)


def kl(d: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """KL(engine ‖ learner) in nats by the estimator k3, from (N,) d = log π_learner − log π_engine."""
    return float(np.mean(np.expm1(d) - d))


def rows(data: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.bool_]]]]:
    """The parts of the N tokens that are printed, each as a name and a mask (N,); empty ones are left out."""
    by_position = np.searchsorted(EDGES, data["positions"], side="right")
    by_probability = np.searchsorted(np.log(LIKELY), data["logprobs"], side="right")
    parts = [("all", np.ones(len(data["gap"]), bool))]
    parts += [(f"position {name}", by_position == i) for i, name in enumerate(RANGES)]
    parts += [(f"probability {name}", by_probability == i) for i, name in enumerate(BY_PROBABILITY)]
    return ((name, mask) for name, mask in parts if mask.any())


def advice(config: Config, data: Mapping[str, Any]) -> list[str]:
    """Sentences on what to change, by where the gap is."""
    d, logprobs = data["gap"].astype(np.float64), data["logprobs"].astype(np.float64)
    gap, causes, head = np.abs(d), list[str](), config.model.fp32_head
    if gap.mean() <= PARITY_NATS[config.model.dtype]:
        return ["learner and engine agree as well as this dtype lets them: nothing to change"]
    if head != "both" and config.model.dtype != "float32":
        causes.append(f"model.fp32_head is {head}: expected both; the head's rounding is most of it")
    spread = logprobs.std()
    if spread > 0 and abs(np.corrcoef(d, logprobs)[0, 1]) > SLOPED:
        slope = float(np.polyfit(logprobs, d, 1)[0])
        causes.append(
            f"d changes by {slope:+.2g} with each nat of the log-prob, as if the engine's temperature were "
            f"{1 + slope:.2f} times the learner's: look at engine.temperature, and a server's top-p and top-k"
        )
    by_position = [gap[mask].mean() for name, mask in rows(data) if name.startswith("position")]
    if by_position[-1] > GROWS * by_position[0]:
        differ = "RoPE scaling, sliding windows or the cache differ between the two"
        causes.append(f"it grows with the position: {differ}")
    same = "it is the same everywhere: other weights, another dtype, or experts that are not replayed"
    return causes or [same]
