"""One optimizer step after another: pack the batch, forward and backward (FSDP2), clip, AdamW.

Every rank calls the same methods in step, each on its share of the batch. Before the update all ranks
exchange their statistics, so that all of them step or all of them refuse.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer

from trainer.accounting.flops import active_parameters, experts_per_token, train_flops
from trainer.accounting.throughput import peak_memory_gb, peak_tflops, throughput
from trainer.config import Config, ConfigError, default_token_budget
from trainer.learner import checkpoint
from trainer.learner.attention import FLASH_DTYPES, flash_kernel
from trainer.learner.critic import NO_SUMS, Critic, overflowed, value_metrics
from trainer.learner.fused_body import fuse_on
from trainer.learner.inputs import Inputs, prefetch
from trainer.learner.lora import adapter_of, add_adapters, weights_for_engines, without_adapters
from trainer.learner.objective import make_kl, make_objective
from trainer.learner.offload import Offload
from trainer.learner.optimizer import LossScale, ShardedAdamW, lr_share
from trainer.learner.packing import MicroBatch
from trainer.learner.part_times import PartTimes
from trainer.learner.policy_model import PolicyModel, PolicyOutput, load
from trainer.learner.ranks import Ranks
from trainer.learner.schedule import DUMMY, MicroStep, imbalance, rank_tokens, schedule
from trainer.learner.sharding import load_from_rank0, local_shard, shard
from trainer.learner.statistics import BatchStats, batch_metrics, lag_histogram, rank_stats, total
from trainer.models.experts import Routers, obstacle, replays_experts
from trainer.models.resolve import base_name, resolve_model
from trainer.telemetry import Clock
from trainer.types import TokenScores, TrainBatch, TrainSequence

MAX_SKIPPED = 3  # steps in a row without finite numbers end the run


class Learner:
    """Model and optimizer at one version; `train` makes the next."""

    def __init__(
        self, config: Config, model_dir: str, clock: Clock,
        resume_from: str | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        self.config, self.clock, self.version = config, clock, 0
        self._offload = Offload()
        self._objective, self._kl = make_objective(config.objective), make_kl(config.objective)
        self.ranks = Ranks.single() if ranks is None else ranks
        settings = config.learner
        self._cuda = self.ranks.device.type == "cuda"
        self._token_budget = settings.micro_batch_tokens or default_token_budget(self._cuda)
        torch.manual_seed(config.seed)
        initial = model_dir if resume_from is None else resolve_model(config.model.path)
        lora = config.model.lora
        self.model = make_policy(initial if lora.rank else model_dir, config, self.ranks)
        self.times = self.model.times = PartTimes(self.ranks.device)
        self._part_seconds: dict[str, float] = {}  # of the step under way
        self._skipped = 0  # steps in a row
        self.tokens: Mapping[int, NDArray[np.float16]] = {}  # of the last step, as StepDone has them
        self.reference: PolicyModel | None = None
        needs_reference = config.objective.needs_reference
        if needs_reference and not (lora.rank and config.objective.kl.to == "initial"):  # else it is the base
            folder = reference_folder(config, model_dir, resume_from)
            self.reference = make_policy(folder, config, self.ranks, frozen=True)
        # Tied ones once, as FSDP2 shards them.
        trained = {name: w for name, w in self.model.lm.named_parameters() if w.requires_grad}
        self.policy = ShardedAdamW(trained, self.ranks, settings, settings.lr, LossScale(config.model.dtype))
        self.weights, self.parameters = weights_for_engines(self.model.lm), self.policy.parameters
        self.adapter = adapter_of(self.model.lm, base_name(config.model.path, initial), lora)
        self.base_dir = initial  # of the adapter's base
        self.adapter_parameters = sum(w.numel() for w in trained.values()) if lora.rank else 0
        self.active_parameters = _active_parameters(self.model)
        self.reference_parameters = needs_reference * _active_parameters(self.reference or self.model)
        self.optimizer = self.policy.adamw
        self.critic: Critic | None = None
        if config.objective.has_critic:
            self.critic = Critic(config, model_dir, self.model, self.policy.scale, self.ranks)
        if resume_from is not None:
            self.version = checkpoint.load(resume_from, self.networks, self.ranks)

    @property
    def networks(self) -> dict[str, ShardedAdamW]:
        """The networks that are trained and stand in a checkpoint, by name."""
        return {"policy": self.policy} | ({"critic": self.critic.optimizer} if self.critic else {})

    @contextmanager
    def on_device(self, moments: bool = True) -> Iterator[None]:
        """Bring weights (and AdamW's moments) onto the GPU for the block, if engines share it."""
        if not self.config.engine.colocate:
            yield
            return
        self._offload.reload(self._stored(moments))
        yield
        self.leave_device()

    def leave_device(self) -> None:
        """Keep weights and moments in the host's memory; returns once every rank's are there, since engines
        take the GPUs of all ranks as soon as rank 0 answers."""
        for model in (self.model, self.reference, self.critic and self.critic.model):
            for module in model.modules() if model else ():
                if isinstance(module, FSDPModule):
                    module.reshard()  # scoring leaves the embeddings gathered
        self._offload.offload(self._stored(moments=True))
        self.ranks.gather(None)

    def _stored(self, moments: bool) -> list[torch.Tensor]:
        """This rank's shards of all networks, and the moments of those that are trained."""
        trained = self.networks.values()
        models = [self.model, self.reference] if self.reference else [self.model]
        frozen = [local_shard(w) for m in models for w in m.parameters() if not w.requires_grad]
        states = [m for network in trained for m in network.moments()] if moments else []
        return [*frozen, *(p for network in trained for p in network.parameters), *states]

    def train(self, batch: TrainBatch) -> dict[str, Any]:
        """One optimizer step; returns its metrics. A ConfigError means that nothing was changed.

        A step whose numbers are not finite is skipped: as for a batch without tokens, the next version has
        the same weights and moments. So its groups count as trained on, and no lag changes."""
        start = time.monotonic()
        lags = self._check(batch)
        self._steps = batch.steps or self.config.pipeline.steps
        with self.clock.state("pack"):
            steps = schedule(batch.sequences, self._token_budget, self.ranks.size)
        self._part_seconds, self.tokens = {}, {}
        metrics = {"learner/loss": 0.0, "learner/lr": self._learning_rate(), "learner/tokens": 0.0}
        metrics["learner/skipped_steps"] = 0.0
        if steps:
            metrics |= self._optimizer_step(steps)
        self.version += 1
        seconds = time.monotonic() - start
        tokens = rank_tokens(steps)
        peak = peak_tflops(self.ranks.device)
        token_flops = train_flops(self.active_parameters, self.adapter_parameters)
        metrics |= throughput(token_flops, sum(tokens), seconds, self.ranks.size, peak)
        return metrics | {
            "learner/peak_memory_gb": peak_memory_gb(self.ranks.device),
            "learner/input_tokens": float(sum(tokens)),
            "learner/rank_tokens": {str(rank): n for rank, n in enumerate(tokens)},
            "learner/micro_batches": float(sum(m is not DUMMY for step in steps for m in step)),
            "learner/rank_imbalance": imbalance(steps),
            **self._unreplayed(steps),
            "learner/tokens_per_s": metrics["learner/tokens"] / seconds,
            "learner/seconds": seconds,
            **{f"learner/seconds_{name}": x for name, x in self._part_seconds.items()},
            "lag/histogram": {str(lag): n for lag, n in lags.items()},
        }

    def score(self, sequences: Sequence[TrainSequence], logprobs: bool = True) -> tuple[TokenScores, ...]:
        """Each model's scores of every token under the present weights; the policy's only for `logprobs`."""
        weighted = [replace(s, token_weights=np.ones(len(s.token_ids), np.float32)) for s in sequences]
        shard: dict[int, dict[str, NDArray[np.float32]]] = {}  # by sequence and field of TokenScores
        models: dict[str, Callable[..., PolicyOutput]] = {"logprobs": self.model} if logprobs else {}
        temperature = self.config.engine.temperature
        if self.config.objective.scores_reference:
            models["logprobs_ref"] = self._frozen
        with torch.no_grad():
            for step in schedule(weighted, self._token_budget, self.ranks.size):
                m = step[self.ranks.rank]
                asked = {"logprobs": m, "logprobs_ref": replace(m, experts=None)}  # it routes as itself
                outputs = {
                    name: model(asked[name], None, temperature, step) for name, model in models.items()
                }
                scored = {name: out.logprobs.cpu().numpy() for name, out in outputs.items()}
                if self.critic is not None:
                    scored["values"] = self.critic.values(m, outputs["logprobs"]).cpu().numpy()
                if m is not DUMMY:
                    for i in np.unique(m.owners).tolist():
                        shard[i] = {name: values[m.owners == i] for name, values in scored.items()}
        by_sequence = {i: scored for scores in self.ranks.gather(shard) for i, scored in scores.items()}
        empty = dict.fromkeys([*models, *(["values"] if self.critic else [])], np.zeros(0, np.float32))
        return tuple(TokenScores(**by_sequence.get(i, empty)) for i in range(len(sequences)))

    def _check(self, batch: TrainBatch) -> dict[int, int]:
        """Loss tokens by lag; refuses a batch that is not the next one, or older than the pipeline allows."""
        if batch.step != self.version + 1:
            raise RuntimeError(f"batch of step {batch.step} came to a learner of version {self.version}")
        histogram, bound = lag_histogram(batch, self.version), self.config.pipeline.lag_bound
        lag = max(histogram, default=0)
        if lag > bound:
            scheme = self.config.pipeline.scheme
            raise RuntimeError(
                f"step {batch.step}: a token's lag is {lag}, above the bound of {scheme}: {bound}"
            )
        return histogram

    def _optimizer_step(self, steps: Sequence[MicroStep]) -> dict[str, Any]:
        """Forward and backward of every micro-batch, then one update; returns the metrics of both.

        The token weights are those of the whole batch, so losses and gradients are summed, never averaged.
        """
        scales = [(s, s.state.clone()) for s in {network.scale for network in self.networks.values()}]
        stats, overflows = self._gradients(steps), 0
        while (stats.overflowed and self.policy.scale.lower()) or (
            overflowed(stats.critic) and self.networks["critic"].scale.lower()
        ):
            self._drop_gradients()
            stats, overflows = self._gradients(steps), overflows + 1
        problem, key = self._problem(stats)
        if problem:
            for scale, before in scales:  # a lower one did not help
                scale.state.copy_(before)
            return self._skip(problem, key)
        self._skipped = 0
        with self.clock.state("optimizer"):
            self._update(stats)
        self.tokens = stats.tokens
        metrics: dict[str, Any] = {"learner/loss": stats.loss, "learner/grad_norm": stats.norm}
        if self.critic is not None:
            metrics |= value_metrics(stats.critic)
        if self.policy.scale.dynamic:
            metrics |= {"learner/loss_scale": self.policy.scale.value, "learner/overflows": float(overflows)}
        return metrics | batch_metrics(stats)

    def _gradients(self, steps: Sequence[MicroStep]) -> BatchStats:
        """Forward and backward of every micro-batch, the loss scaled; the statistics of the batch."""
        outputs, value_sums = list[tuple[MicroBatch, PolicyOutput]](), list[torch.Tensor]()
        with self.clock.state("forward_backward"), self._parts_booked(), self.times.measuring():
            for step, inputs in self._prepared(steps):
                m = step[self.ranks.rank]
                out = self.model(
                    m, self._objective, self.config.engine.temperature, step,
                    self._kl, self.config.objective.entropy_bonus, inputs,
                    self._likeliest(m, step, inputs), self.config.objective.kl.coefficient,
                )  # fmt: skip
                loss = out.loss
                if self.critic is not None and out.values is not None:
                    value_loss, sums = self.critic.loss(m, out.values)
                    loss = loss + value_loss
                    value_sums.append(sums)
                (loss * self.policy.scale.value).backward()
                outputs.append((m, out._replace(loss=out.loss.detach(), values=None)))
            self.policy.collect_gradients()
            critic = NO_SUMS if self.critic is None else self.critic.gradients(steps, value_sums)
            stats = rank_stats(
                outputs, self.version, self.model.loss_replicas, self.policy.squared_norm(), critic,
                self._kl is not None or self.config.objective.kl.top_k > 0,
            )  # fmt: skip
        with self.clock.state("optimizer"):
            return total(self.ranks.gather(stats))

    def _frozen(self, *args: Any) -> PolicyOutput:
        """The output of the reference: a model of its own, or the base without adapters."""
        output: PolicyOutput = (
            self.reference(*args) if self.reference else without_adapters(self.model, *args)
        )
        return output

    def _likeliest(
        self, m: MicroBatch, step: MicroStep, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(N, k) a teacher's likeliest tokens, and their log-probs; None without `kl.top_k`."""
        if not (k := self.config.objective.kl.top_k):
            return None
        bound = self.model.lm.config.get_text_config().vocab_size
        temperature = self.config.engine.temperature
        with torch.no_grad():
            itself = replace(inputs, experts=None)  # it routes as itself
            return self._frozen(m, None, temperature, step, None, 0.0, itself, None, 0.0, (k, bound)).top

    def _prepared(self, steps: Sequence[MicroStep]) -> Iterator[tuple[MicroStep, Inputs]]:
        """The micro-steps and this rank's tensors of each; on a GPU those of the next are made meanwhile."""
        columns = self.model.columns(self._objective, self._kl)

        def make(step: MicroStep) -> Inputs:
            return self.model.inputs(step[self.ranks.rank], step, columns)

        return zip(steps, prefetch(make, steps) if self._cuda else map(make, steps), strict=True)

    def _unreplayed(self, steps: Sequence[MicroStep]) -> dict[str, float]:
        """The share of input tokens some of whose experts are not known, if experts are replayed."""
        if self.model.routers is None:
            return {}
        lacking = [
            len(m.input_ids) if m.experts is None else int((m.experts < 0).any(1).sum())
            for step in steps
            for m in step
            if m is not DUMMY
        ]
        return {"learner/experts_not_replayed": sum(lacking) / max(1, sum(rank_tokens(steps)))}

    @contextmanager
    def _parts_booked(self) -> Iterator[None]:
        """Book the parts of the block, which waits for its device in the end, as states of their own."""
        start = time.monotonic()
        yield
        parts = self.times.read()
        total = max(time.monotonic() - start, sum(parts.values()))
        rest = total - sum(parts.values())
        self.clock.split({name: x / total for name, x in {**parts, "forward_backward": rest}.items()})
        self._part_seconds = {name: self._part_seconds.get(name, 0.0) + x for name, x in parts.items()}

    def _problem(self, stats: BatchStats) -> tuple[str, str]:
        """The number of the step that is not finite, if any, and the learning rate to lower. Every rank has
        the same numbers, so all step or none."""
        critic = value_metrics(stats.critic)
        value_loss, value_norm = critic["critic/loss"], critic["critic/grad_norm"]
        if stats.problem:
            return stats.problem, "learner.lr"
        if not (math.isfinite(value_loss) and math.isfinite(value_norm)):
            text = f"the critic's loss is {value_loss:g}, its gradient norm is {value_norm:g}"
            return text, "objective.critic.lr"
        finite = math.isfinite(stats.loss) and math.isfinite(stats.norm)
        return "" if finite else f"loss is {stats.loss:g}, the gradient norm is {stats.norm:g}", "learner.lr"

    def _skip(self, problem: str, key: str) -> dict[str, Any]:
        """Leave the weights as they are; the step's metrics. ConfigError if it is the last of MAX_SKIPPED."""
        self._drop_gradients()
        self._skipped += 1
        if self._skipped == MAX_SKIPPED:
            raise ConfigError(
                f"step {self.version + 1}: {problem}; expected finite numbers, and it is the {MAX_SKIPPED}rd "
                f"step in a row without, so nothing was updated. Lower {key} or raise learner.warmup_steps, "
                "then --resume from an earlier checkpoint"
            )
        return {"learner/loss": math.nan, "learner/skipped_steps": 1.0, "learner/skipped_why": problem}

    def _update(self, stats: BatchStats) -> None:
        """Clip and step."""
        rate = self._learning_rate()
        self.policy.step(stats.norm, rate)
        if self.critic is not None:
            value_norm = value_metrics(stats.critic)["critic/grad_norm"]
            self.critic.optimizer.step(value_norm, self.critic.lr * rate / self.config.learner.lr)
        for scale in {network.scale for network in self.networks.values()}:  # a shared body's once
            scale.record_step()

    def _drop_gradients(self) -> None:
        for network in self.networks.values():
            network.adamw.zero_grad(set_to_none=True)

    def _learning_rate(self) -> float:
        """Learning rate of the next step."""
        settings = self.config.learner
        return settings.lr * lr_share(settings, self.version + 1, self._steps)


def _active_parameters(model: PolicyModel) -> int:
    """Parameters that a token passes through; of the whole model, whatever this rank's shard."""
    shapes = {name: weight.shape for name, weight in weights_for_engines(model.lm).items()}
    return active_parameters(shapes, experts_per_token(model.lm.config.get_text_config().to_dict()))


def reference_folder(config: Config, model_dir: str, resume_from: str | None) -> str:
    """The folder of the frozen reference: the run's first weights, or another model's. ConfigError if that
    model has another tokenizer, since it scores the policy's token ids."""
    name = config.objective.kl.to
    if name == "initial":
        return model_dir if resume_from is None else resolve_model(config.model.path)
    folder = resolve_model(name, key="objective.kl.to")
    ours, other = (AutoTokenizer.from_pretrained(path).get_vocab() for path in (model_dir, folder))
    if ours != other:
        differ = sum(other.get(token) != i for token, i in ours.items()) or len(other.keys() - ours)
        raise ConfigError(
            f"objective.kl.to {name}: its tokenizer differs from the policy's in {differ} of {len(ours)} "
            "tokens; expected a model with the same token ids, such as a larger one of the same family"
        )
    return folder


def make_policy(model_dir: str, config: Config, ranks: Ranks, frozen: bool = False) -> PolicyModel:
    """The model in the folder on this rank's device: whole, or its shard. A frozen one only scores."""
    checkpointed = config.learner.checkpoint_activations and not frozen
    policy = PolicyModel(model_dir, config.model, checkpointed, empty=ranks.mesh is not None)
    adapted = config.model.lora.rank > 0 and not frozen
    if frozen:
        policy.freeze()
    elif adapted:
        add_adapters(policy.lm, policy.dtype, config.model.lora, config.seed)
    policy.freeze_weights(() if frozen else config.learner.freeze)
    lines = [fuse_on(ranks.device, policy.lm, policy.dtype, config.model.match_engine)]
    setting, text = config.model.replay_experts, policy.lm.config.get_text_config()
    if not frozen and replays_experts(setting, text):
        policy.routers = Routers(policy.lm)
    elif not frozen and setting is None and experts_per_token(text.to_dict()):
        lines.append(f"experts are not replayed, since {obstacle(text)}")
    if ranks.device.type == "cuda":
        lines.append(flash_kernel()[1] if policy.dtype in FLASH_DTYPES else "attention in float32, by blocks")
    policy.kernels = "; ".join(filter(None, lines))
    if ranks.mesh is None:
        return policy.to(ranks.device)
    shard(policy, ranks.mesh, config.learner.vocab_parallel)
    source = load(model_dir) if ranks.rank == 0 else None
    if source is not None and adapted:
        add_adapters(source, policy.dtype, config.model.lora, config.seed)
    load_from_rank0(policy.lm, source)
    return policy
