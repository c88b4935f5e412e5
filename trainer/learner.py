"""The learner's process: batches in, gradients, AdamW steps, new weights out."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from kernels import CISPO
from trainer import checkpoint
from trainer.clock import Clock
from trainer.config import Config, ConfigError
from trainer.messages import Failed, Ready, Refused, Save, Saved, Score, Scored, Shutdown, StepDone
from trainer.packing import MicroBatch, pack
from trainer.policy_model import PolicyModel
from trainer.publish import Publisher, unique_weights
from trainer.types import TrainBatch, TrainSequence


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What the forward passes said of a batch's N loss tokens."""

    logprobs: NDArray[np.float32]
    logprobs_gen: NDArray[np.float32]
    entropy: NDArray[np.float32]


class Learner:
    """Model and optimizer at one version; `train` makes the next."""

    def __init__(self, config: Config, model_dir: str, clock: Clock, resume_from: str | None = None) -> None:
        self.config, self.clock, self.version = config, clock, 0
        settings = config.learner
        torch.manual_seed(config.seed)
        self.model = PolicyModel(model_dir, config.model, settings.checkpoint_activations)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        if resume_from is not None:
            self.version = checkpoint.load(resume_from, self.optimizer)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        """One optimizer step; its metrics. Nothing is changed when the batch is refused."""
        start = time.monotonic()
        self._check(batch)
        micro_batches = pack(batch.sequences, self.config.learner.micro_batch_tokens)
        metrics = {"learner/loss": 0.0, "learner/lr": self._learning_rate(), "learner/tokens": 0.0}
        if micro_batches:
            metrics |= self._step(micro_batches)
        self.version += 1
        seconds = time.monotonic() - start
        fed = sum(len(m.input_ids) for m in micro_batches)
        return metrics | {
            "learner/input_tokens": float(fed),
            "learner/micro_batches": float(len(micro_batches)),
            "learner/tokens_per_s": metrics["learner/tokens"] / seconds,
            "learner/seconds": seconds,
        }

    def score(self, sequences: Sequence[TrainSequence]) -> tuple[NDArray[np.float32], ...]:
        """Log-probs of every token of the sequences under the present weights."""
        everything = [replace(s, weights=np.ones(len(s.token_ids), np.float32)) for s in sequences]
        scores = [np.zeros(0, np.float32)] * len(sequences)
        with torch.no_grad():
            for micro_batch in pack(everything, self.config.learner.micro_batch_tokens):
                out = self.model(micro_batch, None, self.config.engine.temperature)
                for i in np.unique(micro_batch.owners):
                    scores[i] = out.logprobs.numpy()[micro_batch.owners == i]
        return tuple(scores)

    def _check(self, batch: TrainBatch) -> None:
        """Refuse a batch that is not the next one, or older than the pipeline allows."""
        if batch.step != self.version + 1:
            raise RuntimeError(f"batch of step {batch.step} came to a learner of version {self.version}")
        lag, bound = max(lag_histogram(batch, self.version), default=0), self.config.pipeline.max_lag
        if lag > bound:
            raise RuntimeError(f"step {batch.step}: a token's lag is {lag}, above pipeline.max_lag = {bound}")

    def _step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Forward and backward of every micro-batch, then one update; the weights are final, so sums do."""
        objective = CISPO(max_ratio=self.config.objective.max_ratio)
        loss, records = 0.0, []
        with self.clock.state("forward_backward"):
            for m in micro_batches:
                try:
                    out = self.model(m, objective, self.config.engine.temperature)
                except ValueError as e:  # the kernel refuses such inputs before it makes a loss
                    raise self._refusal(str(e)) if "NaN or infinity" in str(e) else e from e
                out.loss.backward()
                loss += float(out.loss.detach())
                records.append(
                    TokenRecord(out.logprobs.detach().numpy(), m.logprobs_gen, out.entropy.detach().numpy())
                )
        with self.clock.state("optimizer"):
            norm = self._update(loss)
        return {
            "learner/loss": loss,
            "learner/grad_norm": norm,
            "learner/lr": self.optimizer.param_groups[0]["lr"],
            "learner/tokens": float(sum(len(r.logprobs) for r in records)),
        } | ratio_metrics(records, self.config.objective.max_ratio)

    def _update(self, loss: float) -> float:
        """Clip and step; returns the gradient's norm before clipping. ConfigError if it is not finite."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if not (np.isfinite(loss) and torch.isfinite(norm)):
            raise self._refusal(f"loss is {loss:g}, the gradient's norm {float(norm):g}")
        clip = self.config.learner.grad_clip
        # The fused kernel divides gradients by `grad_scale` as it reads them: clipping costs no pass.
        self.optimizer.grad_scale = (norm / clip).clamp(min=1.0) if clip else None  # type: ignore[attr-defined]  # unstubbed
        self.optimizer.param_groups[0]["lr"] = self._learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)

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
    own = [version - s.versions[s.weights != 0] for s in batch.sequences]
    lags, tokens = np.unique(np.concatenate([np.zeros(0, np.int32), *own]), return_counts=True)
    return dict(zip(lags.tolist(), tokens.tolist(), strict=True))


def ratio_metrics(records: Sequence[TokenRecord], max_ratio: float) -> dict[str, float]:
    """How far trainer and generator are apart, over a batch's loss tokens; ρ = π_train / π_gen."""
    log_ratio = np.concatenate([r.logprobs - r.logprobs_gen for r in records]).astype(np.float64)
    ratio = np.exp(log_ratio)
    return {
        "ratio/mean": float(ratio.mean()),
        "ratio/min": float(ratio.min()),
        "ratio/max": float(ratio.max()),
        "ratio/truncated": float((ratio > max_ratio).mean()),
        "ratio/ess": float(
            ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
        ),  # effective sample size, share
        "kl/k1": float(-log_ratio.mean()),  # estimates of KL(generator || learner), in nats
        "kl/k3": float((ratio - 1 - log_ratio).mean()),
        "learner/entropy": float(np.mean(np.concatenate([r.entropy for r in records]))),
    }


def learner_main(
    config: Config,
    model_dir: str,
    conn: Connection,
    threads: int,
    resume_from: str | None,
    telemetry: Connection,
) -> None:
    """Entry of the spawned process. `resume_from` is the checkpoint whose optimizer goes with `model_dir`."""
    torch.set_num_threads(threads)
    transformers_logging.disable_progress_bar()
    clock = Clock("learner", telemetry.send)
    try:
        _serve(config, model_dir, conn, clock, resume_from)
        clock.flush()
    except (EOFError, ConnectionError):
        return  # the controller is gone: the launcher tells why
    except Exception as e:
        user_error = isinstance(e, ConfigError)
        telemetry.send(Failed("learner", str(e) or repr(e), traceback.format_exc(), user_error))
        raise SystemExit(1) from e


def _serve(config: Config, model_dir: str, conn: Connection, clock: Clock, resume_from: str | None) -> None:
    """Answer messages until Shutdown."""
    start = time.monotonic()
    learner = Learner(config, model_dir, clock, resume_from)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    weights = unique_weights(learner.model.lm)
    parameters = sum(w.numel() for w in weights.values())
    files = config.pipeline.max_lag + 2  # waiting, held back for an evaluation, being written
    publisher = Publisher(config.run_dir, parameters * dtype.itemsize, files, dtype)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    conn.send(
        Ready({"parameters": parameters, "dtype": config.model.dtype, "seconds": time.monotonic() - start})
    )
    clock.enter("idle")
    while not isinstance(message := conn.recv(), Shutdown):
        match message:
            case TrainBatch():
                lag = lag_histogram(message, learner.version)
                try:
                    metrics = learner.train(message)
                except ConfigError as e:  # nothing was changed: these weights can still be saved
                    conn.send(Refused(str(e)))
                    continue
                path = ""  # an empty batch leaves the weights as they are
                if metrics["learner/tokens"]:
                    with clock.state("publish"):
                        path = publisher.publish(weights, learner.version)
                conn.send(StepDone(learner.version, path, metrics, lag))
            case Score(sequences):
                with clock.state("score"):
                    scores = learner.score(sequences)
                conn.send(Scored(scores))
            case Save(path, state):
                with clock.state("checkpoint"):
                    lm, version = learner.model.lm, learner.version
                    checkpoint.save(path, lm, tokenizer, learner.optimizer, version, state)
                    checkpoint.prune(config.run_dir, config.logging.keep_checkpoints)
                conn.send(Saved(path))
    publisher.close()
