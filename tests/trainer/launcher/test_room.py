"""Promises of the plan for one GPU: what is not set is chosen so that it fits, and what cannot is refused.

`pytest -s tests/trainer/launcher/test_room.py -k table` prints the tables of docs/lora.md and docs/gpu.md."""

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from fakes import having

from trainer import gpus
from trainer.beginning import begin
from trainer.cli import parse, to_yaml
from trainer.config import Config
from trainer.launcher import memory_estimate, notices, room
from trainer.launcher.memory_estimate import SIZES
from trainer.launcher.placement import Devices
from trainer.main import main, planned

CARDS = {  # as nvidia-smi lists them
    "24 GB": "0, GPU-aa01, NVIDIA GeForce RTX 4090, 24564\n",
    "48 GB": "0, GPU-bb02, NVIDIA RTX 6000 Ada Generation, 49140\n",
    "80 GB": "0, GPU-cc03, NVIDIA H100 80GB HBM3, 81559\n",
    "141 GB": "0, GPU-dd04, NVIDIA H200, 143771\n",
}
ONE_CARD = ("24 GB", "48 GB", "80 GB")
FULL, LORA = "", "--model.lora.rank 16"
MODELS = ("0.6B", "1.7B", "4B", "8B")
DOCS = Path(__file__).parents[3] / "docs"
SIZES_OF_GPU_PAGE, LENGTHS, COUNTS = ("0.6B", "4B", "8B"), (1024, 14_336, 34_816), (1, 2, 4, 8)
DryRun = Callable[..., tuple[int, str]]


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """Exit code and plan, or error, of a dry run with `count` cards, with or without vLLM."""
    card, find = [""], importlib.util.find_spec
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for module in (gpus, notices):
        monkeypatch.setattr(module, "without_cuda", lambda: "")
    monkeypatch.setattr(memory_estimate, "_ram", lambda: 2.0**41)

    def run(command: list[str], **more: Any) -> CompletedProcess[str]:
        return CompletedProcess(command, 0, "" if command[1] == "-L" else card[0])

    monkeypatch.setattr(gpus.subprocess, "run", run)

    def plan(
        name: str, vllm: bool, model: str, *flags: str, recipe: str = "scalerl", count: int = 1,
        line: str = "plan|error",
    ) -> tuple[int, str]:  # fmt: skip
        there = object() if vllm else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda x, *y: there if x == "vllm" else find(x, *y))
        card[0] = "".join(CARDS[name].replace("0, GPU", f"{i}, GPU", 1) for i in range(count))
        path = f"Qwen/Qwen3-{model}-Base"
        words = f"--recipe {recipe} --task gsm8k --model.path {path} --dry-run {' '.join(flags)}".split()
        code, said = main(words), capsys.readouterr()
        return code, "\n".join(re.findall(rf"(?m)^(?:{line})[:,].*", said.out + said.err))

    return plan


def cell(line: str) -> str:
    """A plan, or a refusal, in short."""
    if line.startswith("error"):
        changes = line.partition("Would fit: ")[2].split(" · ")
        changes = [
            c.partition(", which")[0].replace("--model.lora.", "").removeprefix("a GPU of ") for c in changes
        ]
        return f"no: {', '.join(c.partition(':')[0].removeprefix('--') for c in changes)}"
    tokens, kept, slots, rank, engine = re.search(  # type: ignore[union-attr]  # each plan has them
        r"of ([\d,]+) tokens, activations (\w+), (\d+) .*rank takes ([\d.]+)(?: and the engine ([\d.]+))?",
        line,
    ).groups()
    portions = f"{int(tokens.replace(',', '')) // 1024}K{', recomputed' * (kept == 'recomputed')}"
    return f"{portions}; {slots} sequences; {rank}{f' + {engine}' if engine else ''} GiB"


def test_the_tables_in_the_docs_are_those_of_the_dry_run(dry_run: DryRun) -> None:
    rows = []
    for vllm in (True, False):
        for model in MODELS:
            for flags in (FULL, LORA):
                cells = [cell(dry_run(card, vllm, model, flags)[1]) for card in ONE_CARD]
                rows.append(f"| {model} | {'rank 16' if flags else 'full'} | {' | '.join(cells)} |")
    print("\n".join(["", *rows]))
    assert [row for row in rows if row not in (DOCS / "lora.md").read_text()] == []


def short(line: str) -> str:
    """A dry run in short: GPUs of engine + learner, tokens of a micro-batch, GiB of a learner rank."""
    if "error: " in line:
        changes = line.partition("Would fit: ")[2].replace("--model.lora.", "").replace("a GPU of ", "")
        return "no: " + ", ".join(changes.replace("--engine.max_new_tokens ", "≤ ").split(" · "))
    split = re.search(r"rates, (\d\+\d) GPUs", line)
    tokens, recomputed, gib = re.search(  # type: ignore[union-attr]  # each plan has them
        r"of (\d+),\d+ tokens, activations (?:kept|(recomputed)), .*rank takes ([\d.]+)", line
    ).groups()
    return f"{split[1] if split else 'in turns'}; {tokens}K{' r' * bool(recomputed)}; {gib}"


def test_the_table_of_the_gpu_page_is_that_of_the_dry_run(dry_run: DryRun) -> None:
    rows = []
    for card in ("80 GB", "141 GB"):
        for model in SIZES_OF_GPU_PAGE:
            for length in LENGTHS:
                flags = f"--engine.interruption.enabled false --engine.max_new_tokens {length}"
                lines = (
                    dry_run(card, True, model, flags, count=n, line="plan|error|at assumed rates")[1]
                    for n in COUNTS
                )
                rows.append(f"| {card} | {model} | {length // 1024}K | {' | '.join(map(short, lines))} |")
    print("\n".join(["", *rows]))
    assert [row for row in rows if row not in (DOCS / "gpu.md").read_text()] == []


def test_turns_on_a_host_that_cannot_hold_what_leaves_the_gpus_are_refused(
    dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--engine.interruption.enabled false --engine.max_new_tokens 34816"
    for ram, code in ((300, 0), (100, 2)):
        monkeypatch.setattr(memory_estimate, "_ram", lambda ram=ram: ram * G)
        assert dry_run("80 GB", True, "8B", flags, count=4, line="error")[0] == code
    code, line = dry_run("80 GB", True, "8B", flags, count=4, line="error")
    assert "on the host: about" in line and "this machine has 100.0" in line


G, V = 2.0**30, 151_936
# Bytes of a learner rank: FP32 masters, their gradients, Adam's two moments | activations (kept: 32
# bytes a channel and 8 a channel of the MLP; recomputed: two bf16 tensors between layers) | the head in
# bf16, dW in FP32 and bf16 | embedding and head gathered in FP32 | FP32 logits of 8,192 rows, times what
# fits in half of what is free | CUDA, twice where an engine sleeps. Then bytes of an engine's weights
# and of a token's keys and values; a sequence has the prompt's 128 tokens and a third of the longest
# completion on average.
CELLS = [
    ("80 GB", 1, "0.6B", 34_816, [(4 + 4 + 8) * 0.596e9, 28 * 34_944 * (32 * 1024 + 8 * 3072),
      (2 + 4 + 2) * V * 1024, 0, 4 * V * 8192, 2 * 1.5 * G], 2 * 0.596e9, 2 * 28 * 1024 * 2),
    ("80 GB", 2, "4B", 34_816, [(4 + 4 + 8) * 4.022e9 / 2, 36 * 34_944 * 2 * 2 * 2560,
      (2 + 4 + 2) * V * 2560, 4 * V * 2560, 4 * V * 3 * 8192, 2 * 1.5 * G], 2 * 4.022e9, 2 * 36 * 1024 * 2),
    ("80 GB", 4, "8B", 14_336, [(4 + 4 + 8) * 8.19e9 / 3, 36 * 16_384 * 2 * 2 * 4096,
      (2 + 4 + 2) * V * 4096, 2 * 4 * V * 4096, 4 * V * 8192, 1.5 * G], 2 * 8.19e9, 2 * 36 * 1024 * 2),
    ("141 GB", 8, "4B", 14_336, [(4 + 4 + 8) * 4.022e9 / 2, 36 * 16_384 * (32 * 2560 + 8 * 9728),
      (2 + 4 + 2) * V * 2560, 4 * V * 2560, 4 * V * 8192, 1.5 * G], 2 * 4.022e9, 2 * 36 * 1024 * 2),
]  # fmt: skip


@pytest.mark.parametrize(("card", "count", "model", "longest", "rank", "weights", "token"), CELLS)
def test_four_cells_of_it_are_within_a_twentieth_of_an_account_by_hand(
    card: str, count: int, model: str, longest: int, rank: list[float], weights: float, token: int,
    dry_run: DryRun,
) -> None:  # fmt: skip
    flags = f"--engine.interruption.enabled false --engine.max_new_tokens {longest}"
    code, line = dry_run(card, True, model, flags, count=count)
    slots, gib = re.search(r"(\d+) sequences at once; a learner rank takes ([\d.]+)", line).groups()  # type: ignore[union-attr]
    assert code == 0 and float(gib) == pytest.approx(sum(rank) / G, rel=0.05)
    cache = 0.9 * {"80 GB": 79.65, "141 GB": 140.4}[card] * G - 3.5e9 - weights
    assert 0 <= cache / token / (128 + longest / 3) - int(slots) < 8 * 1.05  # in eights


HAND = [
    # Base 8.19 G x 2 bytes: 15.26; adapters .65; residual streams 36 x 2,048 x 16 KiB: 1.13; logits 2,048 x
    # 151,936 x 4: 1.16; the widest weight, 4,096 x 12,288 x 10: .47; CUDA twice: 3.0. vLLM has .9 x 23.99 -
    # 3.26 - 15.26 = 3.07 GiB for keys and values, of 144 KiB a token: 60 of 128 + 482 / 2 tokens, in eights.
    ("24 GB", True, "8B", LORA, 15.26 + 0.65 + 1.13 + 1.16 + 0.47 + 3.0, 2048, True, 56),
    # 4.02 G x 16: 59.94; 36 x 8,192 x 10 KiB: 2.81; logits 8,192 x 151,936 x 4: 4.64; the head (389 M) and dW
    # twice in bf16: 2.17; CUDA twice: 3.0. With 16,384 tokens 2.81 more and FP32's dW (.72): beyond 73.3.
    ("80 GB", True, "4B", FULL, 59.94 + 2.81 + 4.64 + 2.17 + 3.0, 8192, True, 512),
    # .596 G x 16: 8.88; 28 x 4,096 x 4 KiB: .44; logits 2.32; head .87; CUDA 1.5. The engine beside it:
    # weights 1.11, keys and values 4 x 2 x 28 x 1,024 x 16 x 610 x 2: 4.17, logits .03, CUDA 1.5.
    ("24 GB", False, "0.6B", FULL, 8.88 + 0.44 + 2.32 + 0.87 + 1.5, 4096, True, 16),
]  # fmt: skip


@pytest.mark.parametrize(("card", "vllm", "model", "flags", "gib", "tokens", "recomputed", "slots"), HAND)
def test_cells_are_those_of_an_account_by_hand(
    card: str, vllm: bool, model: str, flags: str, gib: float, tokens: int, recomputed: bool, slots: int,
    dry_run: DryRun,
) -> None:  # fmt: skip
    code, line = dry_run(card, vllm, model, flags)
    expected = f"micro-batches of {tokens:,} tokens, activations {'recomputed' if recomputed else 'kept'}, "
    assert code == 0 and f"{expected}{slots} sequences at once; a learner rank takes {gib:.1f}" in line
    if vllm:
        assert "vLLM and the learner take turns on the GPU" in line
    else:
        assert "beside the learner on the GPU (vLLM is not installed)" in line
        assert f"and the engine {1.11 + 4.17 + 0.03 + 1.5:.1f} of 24.0 GiB" in line


def test_a_dry_run_says_that_the_run_would_lack_its_engine(dry_run: DryRun) -> None:
    urls = "--engine.urls", "[http://10.0.0.7:8077]"
    for vllm, flags, lacks in ((False, (), True), (True, (), False), (False, urls, False)):
        code, notes = dry_run("80 GB", vllm, "0.6B", "--engine.kind", "vllm", *flags, line="note")
        assert (code, "vLLM is not installed here" in notes) == (0, lacks)


def test_what_cannot_fit_is_refused_with_what_would(dry_run: DryRun) -> None:
    code, line = dry_run("24 GB", True, "1.7B")  # 1.72 G x 16 bytes are 25.6 GiB
    assert code == 2 and "a learner rank: about 31.2 GiB are needed" in line
    assert line.endswith("Would fit: --model.lora.rank 16 · a GPU of 48 GB · 2 such GPUs")
    assert dry_run("48 GB", True, "1.7B")[0] == dry_run("24 GB", True, "1.7B", LORA)[0] == 0
    _, line = dry_run("24 GB", False, "4B", LORA)  # weights twice, and keys and values
    assert "vLLM, which takes turns with the learner" in line and "engine.tensor_parallel 0" in line


@pytest.mark.parametrize("vllm", [True, False])
@pytest.mark.parametrize("cards", [1, 2, 4])
def test_a_run_on_the_cards_that_a_refusal_names_starts_and_with_fewer_it_does_not(
    cards: int, vllm: bool, dry_run: DryRun
) -> None:
    promised = set()
    for card in ONE_CARD:
        for model in MODELS[1:]:
            code, line = dry_run(card, vllm, model, count=cards)
            if code and (more := re.search(r"(\d) such GPUs", line)):
                starts = [n for n in range(cards, 9) if dry_run(card, vllm, model, count=n)[0] == 0]
                assert starts[0] == int(more[1])
                promised.add((card, model))
            elif code:
                assert all(dry_run(card, vllm, model, count=n)[0] for n in range(cards, 9))
    assert promised


def test_on_eight_cards_the_learner_has_the_ranks_and_the_settings_that_fit(dry_run: DryRun) -> None:
    code, line = dry_run("80 GB", True, "8B", count=8)
    assert code == 0 and "vLLM generates on GPUs of its own; micro" in line and "GiB, vLLM 71.7" in line


def test_the_plan_says_where_engines_are_and_nothing_of_those_of_others(dry_run: DryRun) -> None:
    _, line = dry_run("80 GB", False, "0.6B", count=4)
    assert "the torch engine generates on GPUs of its own (vLLM is not installed); " in line
    urls = ["--engine.kind vllm", "--engine.urls [http://h:8077]"]
    _, line = dry_run("80 GB", False, "0.6B", *urls, count=2)
    assert line.startswith("plan: vLLM servers generate; micro-batches") and "at once" not in line
    replay = Devices(16, (("0",),), ())
    line = room.plan(Config(), SIZES["Qwen/Qwen3-0.6B"], replay, 8e10, Config(), set(), lambda _: replay)
    assert line.startswith("plan: micro-batches of 16,384 tokens, activations kept; a learner rank takes")


LONG = "--engine.max_new_tokens 34816 --engine.interruption.enabled false"


def test_no_split_is_taken_that_the_cards_cannot_hold(dry_run: DryRun) -> None:
    """4B with completions of 34K takes 81 GiB on one rank: 3+1 would be 1.5 times as fast, and is refused."""
    assert dry_run("80 GB", True, "4B", LONG, "--learner.ranks 1", count=4)[0] == 2
    code, said = dry_run("80 GB", True, "4B", LONG, count=4, line="at assumed rates")
    assert (
        code == 0
        and "2+2 GPUs" in said
        and "the best split that fits, so it is taken; the next, 1+3, would" in said
    )


def test_the_fastest_split_is_taken_and_said_with_the_next_and_one_that_is_set_stays(dry_run: DryRun) -> None:
    eight = "--engine.interruption.hi 12000"  # 12,000 + 86 + 2,048 tokens, as the paper's
    split = partial(dry_run, "141 GB", True, "8B", eight, count=8)
    _, devices = split(line="devices")
    assert "3 (4 ranks: the fastest split that fits, at assumed rates); engines 4 |" in devices
    said = split(line="at assumed rates")[1]
    assert (
        "4+4 GPUs" in said and "the best split that fits, so it is taken; the next, 5+3, would make" in said
    )
    said = split("--learner.ranks 4", line="at assumed rates")[1]
    assert "4+4 GPUs" in said and "the best split that fits; the next, 5+3, would make" in said
    said = dry_run("141 GB", True, "8B", eight, "--learner.ranks 2", count=8, line="at assumed rates")[1]
    assert "6+2 GPUs" in said and re.search(r"4\+4 would be about 1\.60x as fast", said)
    said = dry_run("141 GB", False, "8B", count=8, line="no rates.*known")[1]
    assert said.endswith("the learner has its usual share, or what its memory needs")


def test_where_no_split_fits_they_take_turns_on_several_cards_unless_one_is_set(dry_run: DryRun) -> None:
    """4B in full with 34K tokens takes 82.5 GiB for one learner rank, and 54.0 to 63.2 for each of two."""
    code, line = dry_run("80 GB", True, "4B", LONG, count=2)
    assert code == 0 and "vLLM and the learner take turns on the GPUs; " in line
    assert "a learner rank takes 63.2" in line
    _, devices = dry_run("80 GB", True, "4B", LONG, count=2, line="devices")
    assert "learner 0, 1 (2 ranks: they take turns with the engines, as no split fits)" in devices
    for flag in ("--engine.colocate false", "--learner.ranks 1", "--engine.count 1"):
        code, line = dry_run("80 GB", True, "4B", LONG, flag, count=2)
        assert code == 2 and "--model.lora.rank 16 · --engine.max_new_tokens 8192 · a GPU of 141 GB" in line


def test_turns_that_were_chosen_end_where_a_run_goes_on_with_more_gpus_and_those_that_are_set_do_not(
    dry_run: DryRun, tmp_path: Path
) -> None:
    """4B in full with 34K tokens: in turns on 2 x 80 GB, 6+2 on 8."""
    stored, on = tmp_path / "config.yaml", f"--resume --run-dir {tmp_path}"
    asked = f"{LONG} --run-dir {tmp_path} --engine.kind vllm".split()
    launch = parse(["--model.path", "Qwen/Qwen3-4B-Base", "--recipe", "scalerl", "--task", "gsm8k", *asked])
    begin(launch, None, "GPU-hours")
    stored.write_text(to_yaml(having(launch.config, engine={"colocate": True})))
    goes_on = partial(dry_run, "80 GB", True, "4B", on, line="plan|devices|at assumed rates")
    assert "take turns on the GPUs; " in goes_on(count=2)[1]
    code, said = goes_on(count=8)
    assert code == 0 and "vLLM generates on GPUs of its own; " in said and "rates, 6+2 GPUs" in said
    assert "take turns on the GPUs; " in goes_on("--engine.colocate true", count=8)[1]
    assert "take turns on the GPU; " in dry_run("141 GB", True, "4B", on)[1]


@pytest.mark.parametrize(
    ("count", "flags", "ranks"),
    [(8, "", "3 ranks: as before"), (7, "", "5 ranks: the"), (8, "--learner.ranks 0", "5 ranks: the"),
     (8, "--learner.ranks 4", "learner 0, 1, 2, 3; "),
     (8, "--learner.checkpoint_activations false", "5 ranks: the")],
)  # fmt: skip
def test_a_run_that_goes_on_keeps_its_split_on_as_many_gpus(
    count: int, flags: str, ranks: str, dry_run: DryRun, tmp_path: Path
) -> None:
    """8B on 8 x 80 GB, which had 3 ranks before the fastest split was taken, 5 now; where those still fit."""
    words = f"--recipe scalerl --task gsm8k --model.path Qwen/Qwen3-8B-Base --run-dir {tmp_path}"
    launch = parse(words.split())
    begin(launch, None, "GPU-hours")
    (tmp_path / "config.yaml").write_text(to_yaml(launch.config))
    roles = {"learner": 3.0, "engine": 1.0} | {f"engine-{i}": 1.0 for i in range(1, 5)} | {"controller": 0.0}
    books = {"unit": "GPU-hours", "roles": {role: {"devices": n} for role, n in roles.items()}}
    (tmp_path / "ledger.json").write_text(json.dumps(books))
    for on in (f"--resume --run-dir {tmp_path}", f"--branch-from {tmp_path}@4 --run-dir {tmp_path}/next"):
        code, said = dry_run("80 GB", True, "8B", on, flags, count=count, line="devices|error|GPUs")
        assert code == 0 and ranks in said


def test_what_is_set_stays_and_a_preset_of_vllm_takes_turns_on_one_gpu(dry_run: DryRun) -> None:
    code, line = dry_run("24 GB", True, "8B", LORA, "--learner.micro_batch_tokens 4096")
    assert code == 2 and "a learner rank: about 23." in line
    assert dry_run("24 GB", True, "8B", LORA, "--learner.checkpoint_activations false")[0] == 2
    _, line = dry_run("80 GB", True, "8B", LORA, "--engine.slots 24 --learner.micro_batch_tokens 1024")
    assert "micro-batches of 1,024 tokens, activations kept, 24 sequences" in line
    _, line = dry_run("80 GB", True, "8B", LORA, "--engine.kind vllm")
    assert "vLLM and the learner take turns" in line


def test_a_resumed_or_branched_run_knows_what_was_set_and_chooses_the_rest_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--engine.slots 64` is the default, which is not chosen once it is set."""
    gib, run, size = [24_564 / 1024], str(tmp_path), SIZES["Qwen/Qwen3-8B"]
    monkeypatch.setattr("trainer.main.smallest_gpu_memory", lambda: gib[0] * 2.0**30)
    monkeypatch.setattr("trainer.main.usable_gpus", lambda: ("0",))
    flags = "--model.path Qwen/Qwen3-8B --model.dtype bfloat16 --model.lora.rank 16 --engine.kind vllm"
    flags += f" --engine.colocate true --engine.slots 64 --run-dir {run}"
    launch = parse(flags.split())
    chosen, _, fixed = planned(launch, size)
    begin(launch, None, "hours")
    (tmp_path / "config.yaml").write_text(to_yaml(chosen))
    assert chosen.learner.checkpoint_activations and chosen.learner.micro_batch_tokens < 16_384

    for words in (f"--resume --run-dir {run}", f"--branch-from {run}@4 --run-dir {run}/next"):
        again = planned(parse(words.split()), size)
        assert again[0].learner == chosen.learner and again[0].engine.slots == 64 and again[2] == fixed
        gib[0] = 140
        roomy = planned(parse(words.split()), size)[0]
        assert not roomy.learner.checkpoint_activations and roomy.engine.slots == 64
        gib[0] = 24_564 / 1024
    (tmp_path / "set_keys.json").write_text(json.dumps(sorted(fixed - {"engine.slots"})))
    assert planned(parse(["--resume", "--run-dir", run]), size)[0].engine.slots != 64
    monkeypatch.setattr("trainer.main.torchrun_ranks", lambda: (1, 2))
    assert planned(launch, size)[0] == launch.config
