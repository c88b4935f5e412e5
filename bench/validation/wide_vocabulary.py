"""The built-in model `tiny` with a vocabulary as wide as real ones, most of which no text contains.

    python -m bench.validation.wide_vocabulary FOLDER [--vocabulary 8192]

Its head then takes most of the learner's time, as in no other model that two cores can train in minutes: for
checking what the benchmarks of the loss predict of a run (`bench.validation.chain`). The further rows of the
head are all one vector u with h·u ≈ −LOGIT for every hidden state h, by least squares: the model answers as
before.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from trainer.models import tiny

SOURCE = Path(tiny.__file__).with_name("tiny_model")
LOGIT = 15.0  # of each further token, below 0: the likely tokens are at about 10


@torch.no_grad()
def widen(folder: Path, vocabulary: int) -> tuple[float, float, float]:
    """Save the model and its tokenizer. The pass rate before and after, and the probability that a token of
    an answer is a further one."""
    model = Qwen3ForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SOURCE)
    own = model.config.vocab_size
    pairs = tiny.problems()
    probes = tiny.encode(pairs[tiny.PROBLEMS : tiny.PROBLEMS + tiny.PROBES], tokenizer)
    ids, is_answer = tiny.encode(tiny.sft_data(pairs[: tiny.PROBES]), tokenizer)
    before = tiny.pass_rate(model, *probes)

    hidden: Tensor = model.model(input_ids=ids[:, :-1]).last_hidden_state[is_answer.bool()]  # (n, H)
    u = torch.linalg.lstsq(hidden, torch.full((len(hidden), 1), -LOGIT)).solution[:, 0]  # (H,)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    model.get_output_embeddings().weight[own:] = u

    p = model(input_ids=probes[0][:, :-1]).logits[probes[1].bool()].softmax(-1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return before, tiny.pass_rate(model, *probes), float(p[:, own:].sum(-1).mean())


def main() -> int:
    """Make the model and say how far it answers as before; the exit code."""
    p = argparse.ArgumentParser(
        prog="python -m bench.validation.wide_vocabulary",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("folder", type=Path, help="folder for the model and its tokenizer")
    p.add_argument("--vocabulary", type=int, default=8192, help="tokens (8192)")
    args = p.parse_args()
    before, after, others = widen(args.folder, args.vocabulary)
    print(
        f"{args.folder}: {args.vocabulary} tokens; pass rate {after:.4f} (tiny: {before:.4f}); "
        f"probability of a further token {others:.1e}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
