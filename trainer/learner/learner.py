"""The learner's process: batches in, gradients, AdamW steps, new weights out; on one rank or several.

controller -- message --> rank 0 --> every rank: packs the batch, takes its share, forward, backward
(FSDP2) --> all see what each found, and step or refuse alike --> rank 0: weights out, answer
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from kernels import CISPO
from trainer.config import Config, ConfigError
from trainer.learner import checkpoint, ranks
from trainer.learner.malloc import keep_freed_memory
from trainer.learner.offload import Offload
from trainer.learner.packing import MicroBatch
from trainer.learner.policy_model import PolicyModel, PolicyOutput, load
from trainer.learner.ranks import Ranks
from trainer.learner.schedule import IDLE, Round, padding, rounds, rows, rows_by_rank
from trainer.learner.sharding import copies, fill, gathered, local, shard, sum_whole
from trainer.learner.statistics import Sums, merged, ratio_metrics, sums_by_lag
from trainer.learner.weight_file import Publisher
from trainer.messages import Push, Pushed, Ready, Refused, Save, Saved, Score, Scored, StepDone
from trainer.roles import run_role
from trainer.telemetry import Clock, send
from trainer.types import TrainBatch, TrainSequence


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank says of its share of a step."""

    loss: float
    squared_norm: float  # of its part of the gradient
    by_lag: dict[int, Sums]
    problem: str  # why it has no numbers


class Learner:
    """Model and optimizer at one version; `train` makes the next. All ranks call the same methods in step."""

    def __init__(
        self,
        config: Config,
        model_dir: str,
        clock: Clock,
        resume_from: str | None = None,
        among: Ranks | None = None,
    ) -> None:
        self.config, self.clock, self.version = config, clock, 0
        self._offload = Offload()
        self.ranks = ranks.alone() if among is None else among
        settings = config.learner
        torch.manual_seed(config.seed)
        mesh, checkpointed = self.ranks.mesh, settings.checkpoint_activations
        self.model = PolicyModel(model_dir, config.model, checkpointed, empty=mesh is not None)
        if mesh is None:
            self.model.to(self.ranks.device)
        else:
            shard(self.model, mesh, settings.vocab_parallel)
            fill(self.model.lm, load(model_dir) if self.ranks.rank == 0 else None)
        self.weights = dict(self.model.lm.named_parameters())  # tied ones once, as FSDP2 shards them
        self.parameters = [local(w) for w in self.weights.values()]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if resume_from is not None:
            self.version = checkpoint.load(resume_from, self.weights, self.optimizer, self.ranks)

    @contextmanager
    def on_device(self, moments: bool = True) -> Iterator[None]:
        """Weights, and AdamW's moments, are on the GPU for the block; where engines use it, only then."""
        if not self.config.engine.colocate:
            yield
            return
        self._offload.back([*self.parameters, *(self._moments() if moments else ())])
        try:
            yield
        finally:
            self.leave_device()

    def leave_device(self) -> None:
        """Keep weights and moments in the host's memory."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # scoring leaves the embeddings whole
        self._offload.away([*self.parameters, *self._moments()])

    def _moments(self) -> list[torch.Tensor]:
        """AdamW's, as far as it has stepped."""
        return [state[name] for state in self.optimizer.state.values() for name in checkpoint.MOMENTS]

    def train(self, batch: TrainBatch) -> dict[str, Any]:
        """One optimizer step; its metrics. Nothing is changed when the batch is refused."""
        start = time.monotonic()
        lag = self._check(batch)
        with self.clock.state("pack"):
            shares = rounds(batch.sequences, self.config.learner.micro_batch_tokens, self.ranks.size)
        metrics = {"learner/loss": 0.0, "learner/lr": self._learning_rate(), "learner/tokens": 0.0}
        if shares:
            metrics |= self._step(batch, shares)
        self.version += 1
        seconds = time.monotonic() - start
        return metrics | {
            "learner/input_tokens": float(rows(shares)),
            "learner/rank_tokens": {str(rank): n for rank, n in enumerate(rows_by_rank(shares))},
            "learner/micro_batches": float(sum(m is not IDLE for share in shares for m in share)),
            "learner/padding": padding(shares),
            "learner/tokens_per_s": metrics["learner/tokens"] / seconds,
            "learner/seconds": seconds,
            "lag/histogram": {str(k): n for k, n in lag.items()},
        }

    def score(self, sequences: Sequence[TrainSequence]) -> tuple[NDArray[np.float32], ...]:
        """Log-probs of every token of the sequences under the present weights."""
        everything = [replace(s, token_weights=np.ones(len(s.token_ids), np.float32)) for s in sequences]
        own: dict[int, NDArray[np.float32]] = {}
        with torch.no_grad():
            for share in rounds(everything, self.config.learner.micro_batch_tokens, self.ranks.size):
                m = share[self.ranks.rank]
                logprobs = self.model(m, None, self.config.engine.temperature, share).logprobs.cpu().numpy()
                if m is not IDLE:
                    own |= {i: logprobs[m.owners == i] for i in np.unique(m.owners).tolist()}
        found = {i: scores for part in self.ranks.gather(own) for i, scores in part.items()}
        return tuple(found.get(i, np.zeros(0, np.float32)) for i in range(len(sequences)))

    def _check(self, batch: TrainBatch) -> dict[int, int]:
        """Loss tokens by lag; refuses a batch that is not the next one, or older than the pipeline allows."""
        if batch.step != self.version + 1:
            raise RuntimeError(f"batch of step {batch.step} came to a learner of version {self.version}")
        histogram, bound = lag_histogram(batch, self.version), self.config.pipeline.max_lag
        lag = max(histogram, default=0)
        if lag > bound:
            raise RuntimeError(f"step {batch.step}: a token's lag is {lag}, above pipeline.max_lag = {bound}")
        return histogram

    def _step(self, batch: TrainBatch, shares: Sequence[Round]) -> dict[str, Any]:
        """Forward and backward of every micro-batch, then one update; the weights are final, so sums do."""
        objective = CISPO(max_ratio=self.config.objective.max_ratio)
        done: list[tuple[MicroBatch, PolicyOutput]] = []
        with self.clock.state("forward_backward"):
            for share in shares:
                m = share[self.ranks.rank]
                out = self.model(m, objective, self.config.engine.temperature, share)
                out.loss.backward()
                done.append((m, out._replace(loss=out.loss.detach())))
            self._collect_gradients()
            own = self._part(batch, done)
        with self.clock.state("optimizer"):
            parts = self.ranks.gather(own)
            loss, norm = self._update(parts)
        by_lag = merged(part.by_lag for part in parts)
        return {
            "learner/loss": loss,
            "learner/grad_norm": norm,
            "learner/lr": self.optimizer.param_groups[0]["lr"],
            "learner/tokens": float(sum(sums.tokens for sums in by_lag.values())),
        } | ratio_metrics(by_lag)

    def _collect_gradients(self) -> None:
        """Give the optimizer this rank's part of the gradient that FSDP2 has summed over the ranks."""
        if self.ranks.mesh is None:
            return
        whole = [w.grad for w in self.weights.values() if not isinstance(w, DTensor)]
        sum_whole([gradient for gradient in whole if gradient is not None])
        for weight, part in zip(self.weights.values(), self.parameters, strict=True):
            if isinstance(weight.grad, DTensor):
                part.grad, weight.grad = weight.grad.to_local(), None

    def _part(self, batch: TrainBatch, done: Sequence[tuple[MicroBatch, PolicyOutput]]) -> Part:
        """What this rank found."""
        by_lag, loss = [], 0.0
        for m, out in done:
            loss += float(out.loss) / self.model.loss_copies  # type: ignore[arg-type]  # it was trained on
            if m is not IDLE and not out.problem:
                logprobs, entropy = out.logprobs.cpu().numpy(), out.entropy.cpu().numpy()
                lags, bound = _lags(batch, m, self.version), self.config.objective.max_ratio
                by_lag.append(sums_by_lag(logprobs, m.logprobs_gen, entropy, lags, bound))
        gradients: dict[float, list[torch.Tensor]] = {}
        for weight, part in zip(self.weights.values(), self.parameters, strict=True):
            if part.grad is not None:
                gradients.setdefault(copies(weight, self.ranks.size), []).append(part.grad)
        squared = sum(float(torch.nn.utils.get_total_norm(of)) ** 2 / n for n, of in gradients.items())
        return Part(loss, squared, merged(by_lag), next((out.problem for _, out in done if out.problem), ""))

    def _update(self, parts: Sequence[Part]) -> tuple[float, float]:
        """Clip and step; returns the loss and the gradient's norm before clipping.

        ConfigError if they are not finite. Every rank has the same numbers, so all step or none.
        """
        loss, norm = sum(part.loss for part in parts), math.sqrt(sum(part.squared_norm for part in parts))
        problem = next((part.problem for part in parts if part.problem), "")
        if problem or not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise self._refusal(problem or f"loss is {loss:g}, the gradient's norm {norm:g}")
        clip = self.config.learner.grad_clip
        # The fused kernel divides gradients by `grad_scale` as it reads them: clipping costs no pass.
        scale = torch.tensor(max(1.0, norm / clip), device=self.ranks.device) if clip else None
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]  # unstubbed
        self.optimizer.param_groups[0]["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"step {self.version + 1}: {what}; expected finite numbers, so nothing was updated. "
            "Lower learner.lr or raise learner.warmup_steps, then --resume from the last checkpoint"
        )

    def _learning_rate(self) -> float:
        """Linear warm-up, then constant."""
        settings = self.config.learner
        return settings.lr * min(1.0, (self.version + 1) / max(1, settings.warmup_steps))


def lag_histogram(batch: TrainBatch, version: int) -> dict[int, int]:
    """Loss tokens by lag: the learner's version minus the token's."""
    own = [version - s.versions[s.token_weights != 0] for s in batch.sequences]
    lags, tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *own]), return_counts=True)
    return dict(zip(lags.tolist(), tokens.tolist(), strict=True))


def _lags(batch: TrainBatch, m: MicroBatch, version: int) -> NDArray[np.int32]:
    """(N,) of the micro-batch's loss tokens; those of one sequence stand together and in order."""
    first = np.flatnonzero(np.diff(m.owners, prepend=-1))
    of = [batch.sequences[i] for i in m.owners[first].tolist()]
    return version - np.concatenate([s.versions[s.token_weights != 0] for s in of])


def learner_main(
    config: Config,
    model_dir: str,
    conn: Connection | None,
    threads: int,
    resume_from: str | None,
    telemetry: Connection | None,
) -> None:
    """Entry of a rank's process. `resume_from` is the checkpoint whose optimizer goes with `model_dir`.

    Only rank 0 has `conn` and books the time of all; a rank that torchrun started has no `telemetry`.
    """
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    among: Ranks | None = None

    def work() -> None:
        nonlocal among
        # Half: who is missing must be told before the controller's own patience ends.
        among = ranks.join(config.pipeline.deadline_s / 2)
        if among.device.type == "cpu":
            keep_freed_memory()
        clock = Clock(
            "learner", partial(send, telemetry) if telemetry is not None and not among.rank else _drop
        )
        _serve(config, model_dir, conn, clock, resume_from, among)
        clock.flush()
        ranks.leave(among)

    def diagnose(error: Exception) -> tuple[str, Exception]:
        return ("learner", error) if among is None else (among.role, among.explain(error))

    run_role("learner", telemetry, work, diagnose)


def _drop(spans: object) -> None:
    """Rank 0 books the time: the others are in step with it."""


def _check_run_folder(run_dir: str, role: str) -> None:
    """Every rank writes its part of a checkpoint there."""
    if not Path(run_dir).is_dir():
        raise ConfigError(
            f"{role} on {socket.gethostname()} does not see the run folder {run_dir}; expected one that all "
            "machines of the learner share, since each writes its part of a checkpoint: give another "
            "--run-dir"
        )


def _serve(
    config: Config,
    model_dir: str,
    conn: Connection | None,
    clock: Clock,
    resume_from: str | None,
    among: Ranks,
) -> None:
    """Answer messages until Shutdown."""
    start = time.monotonic()
    _check_run_folder(config.run_dir, among.role)
    learner = Learner(config, model_dir, clock, resume_from, among)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    parameters = sum(w.numel() for w in learner.weights.values())
    if config.engine.colocate:
        learner.leave_device()
    direct = config.engine.direct_push
    files = config.pipeline.max_lag + 3  # held, waiting, kept back for an evaluation, being written
    publisher, sender = None, None
    if not (among.rank or direct):
        publisher = Publisher(config.run_dir, parameters * dtype.itemsize, files, dtype)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def answer(reply: object) -> None:
        if conn is not None:
            conn.send(reply)

    answer(
        Ready({"parameters": parameters, "dtype": config.model.dtype, "seconds": time.monotonic() - start})
    )
    clock.enter("idle")
    for message in among.messages(conn):
        match message:
            case TrainBatch():
                with learner.on_device():
                    reply = _step(learner, message, publisher, None if direct else dtype)
                answer(reply)
            case Push():
                with clock.state("publish"), learner.on_device(moments=False):
                    if sender is None:
                        from trainer.learner.weight_transfer import Sender  # vLLM's

                        sender = Sender(config.engine, learner.weights, dtype, among.rank, conn)
                    sender.send()
                answer(Pushed())
            case Score(sequences):
                with clock.state("score"), learner.on_device(moments=False):
                    scores = learner.score(sequences)
                answer(Scored(scores))
            case Save(path, state):
                with clock.state("checkpoint"), learner.on_device():
                    lm, version = learner.model.lm, learner.version
                    checkpoint.save(
                        path, lm, tokenizer, learner.weights, learner.optimizer, version, state, among
                    )
                    if not among.rank:
                        checkpoint.prune(config.run_dir, config.logging.keep_checkpoints)
                answer(Saved(path))
    if publisher is not None:
        publisher.close()


def _step(
    learner: Learner, batch: TrainBatch, publisher: Publisher | None, dtype: torch.dtype | None
) -> StepDone | Refused:
    """A step, and its weights as a file in this type, if any."""
    try:
        metrics = learner.train(batch)
    except ConfigError as e:  # nothing was changed: these weights can still be saved
        return Refused(str(e))
    path = ""  # an empty batch leaves the weights as they are
    if metrics["learner/tokens"] and dtype is not None:
        with learner.clock.state("publish"):
            path = _publish(learner, publisher, dtype)
    return StepDone(learner.version, path, metrics)


def _publish(learner: Learner, publisher: Publisher | None, dtype: torch.dtype) -> str:
    """Rank 0 writes, tensor by tensor, what all ranks have parts of; returns the file's path on rank 0."""
    if publisher is not None:
        return publisher.publish(learner.weights, learner.version)
    for weight in learner.weights.values():
        gathered(weight, dtype)
    return ""
