"""Makes the built-in model `tiny` again: `python -m examples.make_tiny FOLDER` (some minutes).

The model is trained on two-digit addition just enough to start RL, by the command `--recipe sft`. Three
answers of ten in its SFT data are right and the others close, so that the model learns to add but is
uncertain, as a pretrained model may be: RL then sharpens it. (With correct answers only and as few steps it
is certain of wrong answers, and RL does not improve it.) Its pass rate starts at about one in six: below a
tenth RL finds too few correct samples; far above, little of the sigmoid is left to see. It is below a
twentieth for 600 steps and then rises, on each machine at other steps, so the checkpoint is chosen by its
evaluation.
"""

import argparse
import hashlib
import json
import random
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM

from trainer.jsonl import read_lines
from trainer.main import main
from trainer.models.tiny import SEED, make_model, make_tokenizer
from trainer.run_folder import checkpoints

PROBLEMS = 6_000
ANSWERS = 4  # in the SFT data, for each problem
RIGHT = 0.3  # share of the answers that are right
ERRORS = (-20, -11, -10, -9, -3, -2, -1, 1, 2, 3, 9, 10, 11, 20)  # of the others
PROBES = 300  # further problems, to measure the pass rate
TARGET = 0.15  # pass rate of the checkpoint that is nearest to it
FLAGS = f"""
    --recipe sft --task addition --data.options {{}} --data.size 0 --data.completion_column completion
    --data.held_out {PROBES} --learner.lr 3e-3 --learner.schedule constant --learner.warmup_steps 0
    --pipeline.prompts_per_step 128 --pipeline.minibatches 50 --pipeline.steps 1200 --evaluation.every 50
    --evaluation.samples 8 --logging.checkpoint_every 50 --logging.keep_checkpoints 24
"""


def make_tiny(folder: Path) -> float:
    """Save the model, in bf16, and its tokenizer; returns its pass rate at T = 1 on unseen problems."""
    tokenizer, pairs = make_tokenizer(), problems()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        untrained, data, held_out, run = (Path(place, name) for name in ("tiny", "sft", "held_out", "run"))
        make_model(SEED).save_pretrained(untrained)
        tokenizer.save_pretrained(untrained)
        rows = [{"question": q, "answer": a, "completion": c} for q, a, c in sft_data(pairs[:PROBLEMS])]
        probes = [{"question": q, "answer": a} for q, a in pairs[PROBLEMS : PROBLEMS + PROBES]]
        for path, lines in ((data, rows), (held_out, probes)):
            path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        paths = ["--model.path", str(untrained), "--data.source", f"{data}.jsonl"]
        paths += ["--data.held_out_source", f"{held_out}.jsonl", "--run-dir", str(run)]
        if code := main([*FLAGS.split(), *paths]):
            raise SystemExit(code)
        rates = {
            row["step"]: row["eval/pass_rate"]
            for row in read_lines(run / "metrics.jsonl")
            if "eval/pass_rate" in row
        }
        saved = {int(path.name.removeprefix("step-")): path for path in checkpoints(str(run))}
        step = min(saved, key=lambda step: abs(rates[step] - TARGET))
        model = AutoModelForCausalLM.from_pretrained(saved[step])
    model.bfloat16().save_pretrained(folder)  # half the bytes; the pass rate changes by .0004
    tokenizer.save_pretrained(folder)
    print(f"`tiny` solves {rates[step]:.3f} of unseen additions after {step} steps")
    return float(rates[step])


def problems() -> list[tuple[str, str]]:
    """(prompt, answer) of every two-digit addition as reasoning-gym asks it; the held-out ones come last,
    as controller/data.py holds out the prompts with the smallest hashes."""
    pairs = [(f"Calculate {a} + {b}.", str(a + b)) for a in range(101) for b in range(101)]
    return sorted(pairs, key=lambda p: hashlib.sha256(p[0].encode()).hexdigest(), reverse=True)


def sft_data(pairs: list[tuple[str, str]]) -> list[tuple[str, str, list[str]]]:
    """(prompt, answer, ANSWERS completions, each of which is right or close)."""
    rng = random.Random(SEED)

    def completion(right: str) -> str:
        if rng.random() < RIGHT:
            return right
        return str(rng.choice([n for n in (int(right) + off for off in ERRORS) if n >= 0]))

    return [(prompt, right, [completion(right) for _ in range(ANSWERS)]) for prompt, right in pairs]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the built-in model `tiny` again.")
    parser.add_argument("folder", type=Path, help="folder for the model and its tokenizer")
    make_tiny(parser.parse_args().folder)
