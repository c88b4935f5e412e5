"""Promises of the learner's process: every message is answered, every failure reported with its cause."""

import json
import multiprocessing
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_ranks import TIMEOUT_S, Peer
from training import config, sequences
from transformers import AutoModelForCausalLM

from trainer.config import Config
from trainer.learner.process import learner_main
from trainer.messages import Ack, Failed, Ready, Refused, Save, Score, Scored, Shutdown, Spans, StepDone
from trainer.types import TrainBatch


class Process(Peer):
    """`learner_main` in a thread of this process, and the controller's end of its pipe."""

    def __init__(self, c: Config, model_dir: str) -> None:
        self.conn, theirs = multiprocessing.Pipe()
        self.telemetry, sender = multiprocessing.Pipe()
        self.code: Any = None

        def work() -> None:
            try:
                learner_main(c, model_dir, theirs, 1, None, sender)
                self.code = 0
            except SystemExit as e:
                self.code = e.code

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert isinstance(self.receive(), Ready)

    def end(self) -> list[Any]:
        """The telemetry, once the thread has ended."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        messages = []
        with suppress(EOFError):
            while self.telemetry.poll():
                messages.append(self.telemetry.recv())
        return messages


def test_the_process_steps_publishes_scores_saves_and_ends(model_dir: str, tmp_path: Path) -> None:
    process = Process(replace(config(), run_dir=str(tmp_path)), model_dir)
    done: StepDone = process.ask(TrainBatch(1, sequences(), {}))
    assert done.version == 1 and done.metrics["lag/histogram"] == {"0": 76}
    assert "lm_head.weight" not in load_file(done.weights_path)  # tied: once
    for batch in (TrainBatch(2, (), {}), TrainBatch(3, sequences(version=2), {}, publish=False)):
        unpublished: StepDone = process.ask(batch)
        assert (unpublished.version, unpublished.weights_path) == (batch.step, "")
    # Without a gradient of its own, after one not published.
    last: StepDone = process.ask(TrainBatch(4, (), {}))
    path = tmp_path / "checkpoints" / "step-000004"
    assert process.ask(Save(str(path), {"version": 4})) == Ack()
    assert json.loads((path / "controller.json").read_text()) == {"version": 4}
    saved, published = AutoModelForCausalLM.from_pretrained(path), load_file(last.weights_path)
    assert all(torch.equal(p, published[n]) for n, p in saved.named_parameters())
    scored: Scored = process.ask(Score(sequences()))
    assert [len(x.logprobs) for x in scored.scores] == [len(s.token_ids) for s in sequences()]
    process.conn.send(Shutdown())
    messages = process.end()
    assert process.code == 0 and not Path(done.weights_path).parent.exists()
    states = {name for t in messages if isinstance(t, Spans) for name, _, _ in t.spans}
    assert {"start-up", "forward_backward", "optimizer", "publish", "checkpoint", "score", "idle"} <= states


def test_a_refused_step_is_answered_and_weights_before_can_be_saved(model_dir: str, tmp_path: Path) -> None:
    process = Process(replace(config(), run_dir=str(tmp_path)), model_dir)
    first = sequences()[0]
    bad = (replace(first, advantages=first.advantages * np.inf),)
    for step in (1, 2):
        skipped = process.ask(TrainBatch(step, bad, {}))
        assert (skipped.version, skipped.weights_path) == (step, "")  # the engines' weights are the newest
    refused = process.ask(TrainBatch(3, bad, {}))
    assert isinstance(refused, Refused) and refused.message.startswith("step 3: advantages holds NaN")
    path = tmp_path / "checkpoints" / "step-000002"
    assert process.ask(Save(str(path), {})) == Ack()
    before, saved = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (model_dir, path))
    assert all(torch.equal(before[n], saved[n]) for n in before)


def test_a_process_that_fails_reports_why(model_dir: str, tmp_path: Path) -> None:
    process = Process(replace(config(), run_dir=str(tmp_path)), model_dir)
    process.conn.send(TrainBatch(7, (), {}))
    (failed,) = [t for t in process.end() if isinstance(t, Failed)]
    assert process.code == 1 and failed.message.startswith("batch of step 7 came to a learner of version 0")


def test_a_machine_that_does_not_see_the_run_folder_says_so(model_dir: str, tmp_path: Path) -> None:
    c = replace(config(), run_dir=str(tmp_path / "elsewhere"))
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(SystemExit):
        learner_main(c, model_dir, None, 1, None, theirs)
    failed: Failed = ours.recv()
    assert failed.user_error and "does not see the run folder" in failed.message


def test_the_process_ends_quietly_when_the_controller_is_gone(model_dir: str, tmp_path: Path) -> None:
    process = Process(replace(config(), run_dir=str(tmp_path)), model_dir)
    process.conn.close()
    assert not [t for t in process.end() if isinstance(t, Failed)] and process.code == 0
