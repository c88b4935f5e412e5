"""Promises of the objectives: each is its paper's formula, on every backend and in every mode.

The surrogates here are written again from the papers, for autograd through whole float64 logits.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import BACKENDS
from losses import error, train
from torch import Tensor

import kernels
from kernels import KL, Clip, Masked, OutsideBand, Term, objectives, policy_loss
from kernels.objectives import BuiltIn, SequenceObjective
from kernels.reference import reference_policy_loss
from kernels.sequence_objectives import HighCovariance, SecondMoment
from trainer import cli
from trainer.config import ObjectiveConfig
from trainer.learner.objective import make_objective

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

N, H, V = 13, 11, 67  # few rows: Triton's interpreter takes 20 ms for each
SEQUENCES = torch.tensor([7] * 4 + [3] * 1 + [9] * 6 + [1] * 2)  # any ids; interleaved below


def problem(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731  # a one-line shorthand
    hidden, weight = rand(N, H).bfloat16().float(), rand(V, H).bfloat16().float()
    targets = torch.randint(V, (N,), generator=g)
    logp = torch.log_softmax((hidden @ weight.T).double(), 1)[torch.arange(N), targets].float()
    sequences = SEQUENCES[torch.randperm(N, generator=g)]
    per_sequence = torch.zeros(10)
    per_sequence[[1, 3, 7, 9]] = torch.tensor([0.6, -1.3, 0.8, -1.1])
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "sequences": sequences,
        "logprobs_gen": logp + 0.7 * rand(N), "logprobs_ref": logp + 0.5 * rand(N),
        "advantages": per_sequence[sequences],
        "token_weights": 1.0 / torch.bincount(sequences)[sequences] / 4,
    }  # fmt: skip


Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # log π, log μ, Â, sequences


def clip(low: float, high: float, dual: float = math.inf) -> Surrogate:
    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
        ratio = (logp - gen).exp()
        best = torch.min(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
        return -torch.where(adv < 0, torch.max(best, dual * adv), best) if dual < math.inf else -best

    return surrogate


def cispo(bound: float) -> Surrogate:
    return lambda logp, gen, adv, _: -(logp - gen).exp().clamp(max=bound).detach() * adv * logp


def icepop(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
    ratio = (logp - gen).exp().detach()
    return -torch.where((ratio >= 0.6) & (ratio <= 1.5), ratio, 0.0) * adv * logp


def gspo(weights: Tensor) -> Surrogate:
    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
        totals = (per_sequence(torch.sum, x, sequences) for x in (weights * (logp - gen), weights))
        ratio = torch.div(*totals).exp()
        return -torch.min(ratio * adv, ratio.clamp(1 - 0.05, 1 + 0.02) * adv)

    return surrogate


def sapo(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
    tau = torch.tensor([2.5, 1.5])[(adv > 0).long()]
    return -4 / (tau * (1 + (-tau * ((logp - gen).exp() - 1)).exp())) * adv


def dppo(low: float, high: float, cap: float, kl: bool) -> Surrogate:
    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
        new, old = logp.exp().detach(), gen.exp()
        divergence = (new - old).abs()
        if kl:
            divergence = old * (old / new).log() + (1 - old) * ((1 - old) / (1 - new)).log()
        above, below = (new > old) & (divergence > high), (new < old) & (divergence > low)
        keep = ~torch.where(adv > 0, above, below)
        return -(new / old).clamp(max=cap) * keep * adv * logp

    return surrogate


def drpo(delta: float) -> Surrogate:
    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
        ratio = (logp - gen).exp()
        return -(ratio * adv - adv.abs() / (2 * delta) * gen.exp() * (ratio - 1) ** 2)

    return surrogate


def per_sequence(f: Callable[[Tensor], Tensor], x: Tensor, sequences: Tensor) -> Tensor:
    """f of each sequence's x, at all its tokens."""
    return torch.stack([f(x[sequences == i]) for i in sequences])


def product(weigh: Callable[[Tensor, Tensor], Tensor]) -> Surrogate:
    """REINFORCE with a weight of the sequence's product of ratios, and of Â."""

    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
        s = per_sequence(torch.prod, (logp - gen).exp().detach(), sequences)
        return -weigh(s, adv) * adv * logp

    return surrogate


def phi(s: Tensor, adv: Tensor) -> Tensor:
    k, rate = torch.where(adv >= 0, 2.0, 3.0), torch.where(adv >= 0, 3.0, 2.0)
    return rate.exp() * s**k * (-rate * s).exp()


def gmpo(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
    ratio = (logp - gen).exp()
    sign = torch.sign(adv)  # the paper's form: the smaller of two in the direction of Â
    best = ratio**sign
    best = torch.min(best, ratio.clamp(math.exp(-0.2), math.exp(0.3)) ** sign) ** sign
    return -per_sequence(lambda x: x.prod() ** (1 / len(x)), best, sequences) * adv


def m2po(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
    """Tokens leave one by one, the largest first."""
    squares, ratio = ((logp - gen) ** 2).detach(), (logp - gen).exp()
    left = {i for i in range(N) if (adv[i] > 0 and ratio[i] > 1) or (adv[i] < 0 and ratio[i] < 1)}
    keep = torch.ones(N)
    while left and sum(float(squares[i]) for i in left) / len(left) > 0.06:
        worst = max(left, key=lambda i: float(squares[i]))
        left.remove(worst)
        keep[worst] = 0
    return -keep * ratio * adv


def covariance(logp: Tensor, adv: Tensor) -> Tensor:
    return ((logp - logp.mean()) * (adv - adv.mean())).detach()


def clip_cov(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
    chosen = (covariance(logp, adv) > 0.5) & (covariance(logp, adv) < 3.0)
    return clip(0.3, 0.4)(logp, gen, adv, sequences) * ~chosen


def kl_cov(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
    chosen = torch.zeros(N).index_fill_(0, covariance(logp, adv).topk(3).indices, 1.0)  # 13 · .3 = 3.9
    return -(logp - gen).exp() * adv + 0.7 * chosen * (logp - gen).abs()


def geometric(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
    mean = per_sequence(torch.mean, (logp - gen).detach(), sequences).exp()
    return cispo(1.5)(logp, gen, adv, sequences) * ((mean >= 0.9) & (mean <= 1.2))


def off_policy(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
    drift = per_sequence(torch.mean, (gen - logp).detach(), sequences)
    return gspo(torch.ones(N))(logp, gen, adv, sequences) * ~((adv < 0) & (drift > 0.05))


OBJECTIVES: dict[str, tuple[Any, Surrogate]] = {
    "CISPO": (kernels.CISPO(1.5), cispo(1.5)),
    "REINFORCE": (kernels.REINFORCE(), lambda logp, gen, adv, _: -adv * logp),
    "TIS": (kernels.TIS(), cispo(2.0)),
    "GRPO": (kernels.GRPO(), clip(0.2, 0.2)),
    "DAPO": (kernels.DAPO(), clip(0.2, 0.28)),
    "DualClip": (kernels.DualClip(), clip(0.2, 0.2, 3.0)),
    "dual clip at 1.1": (Clip(dual=1.1), clip(0.2, 0.2, 1.1)),
    "IcePop": (kernels.IcePop(0.6, 1.5), icepop),
    "GSPO": (kernels.GSPO(0.05, 0.02), gspo(torch.ones(N))),
    "SAPO": (kernels.SAPO(1.5, 2.5), sapo),
}
NO_BOUND = {"REINFORCE", "SAPO", "SFT", "NoReward", "DRPO", "VESPO"}
LATER: dict[str, tuple[Any, Surrogate]] = {  # in fewer modes, which are the op's and not the objective's
    "SFT": (kernels.SFT(), lambda logp, *_: -logp),
    "NoReward": (kernels.NoReward(), lambda logp, *_: 0 * logp),
    "DPPO": (kernels.DPPO(0.001, 0.002, "tv", 1.2), dppo(0.001, 0.002, 1.2, False)),
    "DPPO, KL": (kernels.DPPO(1e-5, 1e-4, "kl"), dppo(1e-5, 1e-4, math.inf, True)),
    "DRPO": (kernels.DRPO(0.05), drpo(0.05)),
    "sequence TIS": (kernels.SequenceTIS(0.8), product(lambda s, _: s.clamp(max=0.8))),
    "sequence MIS": (kernels.SequenceMIS(0.6, 1.45), product(lambda s, _: s * ((s >= 0.6) & (s <= 1.45)))),
    "VESPO": (kernels.VESPO(), product(phi)),
    "GMPO": (kernels.GMPO(0.2, 0.3), gmpo),
    "M2PO": (kernels.M2PO(0.06), m2po),
    "clip-cov": (Masked(Clip(0.3, 0.4), HighCovariance(1.0, 0.5, 3.0)), clip_cov),
    "kl-cov": (kernels.KLCov(0.3, 0.7), kl_cov),
    "geometric mask": (Masked(kernels.CISPO(1.5), OutsideBand(0.9, 1.2)), geometric),
    "V3.2's mask on GSPO": (
        Masked(kernels.GSPO(0.05, 0.02), OutsideBand(math.exp(-0.05), negative=True)), off_policy,
    ),
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature per token": {"temperature": torch.linspace(0.6, 1.7, N)},
    "soft cap": {"softcap": 3.0, "temperature": 0.8},
    "entropy bonus": {"entropy_bonus": 0.3, "softcap": 5.0, "temperature": 1.3},
    "KL k1": {"kl": KL(0.4, "k1")},
    "KL k2": {"kl": KL(0.4, "k2")},
    "KL k3": {"kl": KL(0.4, "k3"), "entropy_bonus": 0.1},
    "KL unbiased": {"kl": KL(0.4, "unbiased"), "chunk_rows": 4},
    "chunks": {"chunk_rows": 4},
}
FEW = ("plain", "KL unbiased")
# Each of Triton's branches in every mode once; of objectives without one the terms are torch's in all.
IN_ALL = {"CISPO", "REINFORCE", "dual clip at 1.1", "IcePop", "GSPO", "SAPO"}
RUNS = [
    (name, mode, backend) for backend in BACKENDS for name in OBJECTIVES | LATER
    for mode in (FEW if name in LATER or (backend == "triton" and name not in IN_ALL) else MODES)
]  # fmt: skip
OBJECTIVES |= LATER


def kl_estimate(estimator: str, logp: Tensor, ref: Tensor, gen: Tensor) -> Tensor:
    log_ratio = logp - ref
    k3 = (-log_ratio).exp() - 1 + log_ratio
    estimates = {"k1": log_ratio, "k2": 0.5 * log_ratio**2, "k3": k3, "unbiased": (logp - gen).exp() * k3}
    return estimates[estimator]


def oracle(p: dict[str, Tensor], surrogate: Surrogate, mode: dict[str, Any]) -> list[Tensor]:
    hidden, weight = (p[k].double().requires_grad_() for k in ("hidden", "weight"))
    kl = mode.get("kl")

    def terms(logp: Tensor) -> Tensor:
        gen, ref = p["logprobs_gen"].double(), p["logprobs_ref"].double()
        out = surrogate(logp, gen, p["advantages"].double(), p["sequences"])
        if kl is not None:
            out = out + kl.coefficient * kl_estimate(kl.estimator, logp, ref, gen)
        return out

    options = {k: mode[k] for k in ("entropy_bonus", "temperature", "softcap") if k in mode}
    inputs = hidden, weight, p["targets"], p["token_weights"]
    loss, logp, entropy = reference_policy_loss(*inputs, terms, **options)
    return [x.detach() for x in (loss, logp, entropy, *torch.autograd.grad(loss, (hidden, weight)))]


def without_reference(p: dict[str, Tensor]) -> dict[str, Any]:
    return {k: x for k, x in p.items() if k != "logprobs_ref"}


def ours(p: dict[str, Tensor], upstream: float = 1.0, **options: Any) -> list[Tensor]:
    out, dx, dw = train(p if "kl" in options else without_reference(p), upstream, **options)
    return [out.loss.detach(), out.logprobs, out.entropy, dx / upstream, dw / upstream]


@pytest.mark.parametrize(("name", "mode", "backend"), RUNS, indirect=["backend"])
def test_every_objective_in_every_mode_on_every_backend_equals_its_formula_in_float64(
    name: str, mode: str, backend: str
) -> None:
    objective, surrogate = OBJECTIVES[name]
    p = problem()
    expected = oracle(p, surrogate, MODES[mode])
    got = ours(p, -2.5, objective=objective, backend=backend, exact=True, **MODES[mode])
    assert abs(float(got[0] - expected[0])) <= 4e-6 * max(1.0, abs(float(expected[0])))
    assert float((got[1] - expected[1]).abs().max()) <= 5e-6
    assert float((got[2] - expected[2]).abs().max()) <= 1e-5
    assert error(got[3], expected[3]) <= 1e-5 and error(got[4], expected[4]) <= 1e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_bound_is_hit_by_some_token_and_missed_by_another(name: str) -> None:
    objective, _ = OBJECTIVES[name]  # or the test above would prove less than it says
    out = policy_loss(**without_reference(problem()), objective=objective)
    share = float(out.stats["ratio/truncated"])
    assert share == 0 if name in NO_BOUND else 0 < share < 1


def evaluate(objective: Any, p: dict[str, Tensor], logp: Tensor, gen: Tensor) -> Term:
    """The objective's terms in float64."""
    if isinstance(objective, SequenceObjective):
        return objective.over_sequences(logp, gen, p["advantages"], p["sequences"], p["token_weights"])
    term: Term = objective(logp, gen, p["advantages"])
    return term


def derivative_error(entry: BuiltIn) -> float:
    """The distance of an objective's derivative from central differences of its loss in each log π.

    An objective either differentiates ρ or holds it constant, as if log μ moved with log π.
    """
    p = {k: x.double() if x.is_floating_point() else x for k, x in problem().items()}
    gen, weights, objective = p["logprobs_gen"], p["token_weights"], entry.make()
    logp = (gen + torch.linspace(-1.41, 1.3, N, dtype=torch.float64)).detach()
    expected = weights * evaluate(objective, p, logp, gen).dloss_dlogp
    errors = []
    for moves_gen in (0.0, 1.0):
        slopes = []
        for step in 1e-5 * torch.eye(N, dtype=torch.float64):
            ends = (evaluate(objective, p, logp + s, gen + moves_gen * s) for s in (step, -step))
            above, below = ((weights * term.loss).sum() for term in ends)
            slopes.append((above - below) / 2e-5)
        errors.append(error(torch.stack(slopes), expected))
    return min(errors)


@pytest.mark.parametrize("name", objectives.OBJECTIVES)
def test_the_derivative_of_every_objective_in_the_table_is_that_of_its_loss(name: str) -> None:
    assert derivative_error(objectives.OBJECTIVES[name]) < 1e-7


def test_the_table_s_settings_are_settings_of_its_objectives() -> None:
    for entry in objectives.OBJECTIVES.values():
        values = {name: 0.125 + i / 8 for i, name in enumerate(entry.settings.values())}
        changed = repr(entry.make(**values))
        assert all(f"{name}={x}" in changed for name, x in values.items())


def test_a_key_of_the_table_reaches_its_objective_or_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(objectives.OBJECTIVES, "dapo", BuiltIn(kernels.DAPO, {"global_std": "high"}))
    made = make_objective(ObjectiveConfig(loss="dapo", global_std=0.75))
    assert made == kernels.DAPO(0.2, 0.75)
    monkeypatch.setitem(objectives.OBJECTIVES, "dapo", BuiltIn(kernels.DAPO, {"clip_hihg": "high"}))
    with pytest.raises(AttributeError, match="clip_hihg"):
        cli.parse(["--objective.loss", "dapo"])


def test_the_page_s_objective_is_built_in_by_its_class_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="loss 'soft_clip': expected one of cispo"):
        cli.parse(["--objective.loss", "soft_clip"])
    (snippet,) = re.findall(r"^```python\n([^`]*class SoftClip.*?)^```", PAGE.read_text(), re.M | re.S)
    namespace = {"Term": Term}
    monkeypatch.setitem(
        objectives.OBJECTIVES, "soft_clip", BuiltIn(kernels.REINFORCE)
    )  # to be taken out again
    exec(snippet, namespace)
    assert derivative_error(objectives.OBJECTIVES["soft_clip"]) < 1e-7
    made = make_objective(cli.parse(["--objective.loss", "soft_clip"]).config.objective)
    assert isinstance(made, namespace["SoftClip"])  # type: ignore[arg-type]  # the class that the page defines
    p = problem()
    found = ours(p, objective=made)
    assert found[0] == ours(p, objective=lambda *inputs: made(*inputs))[0]  # type: ignore[operator]


def test_sapo_worked_by_hand() -> None:
    """σ(0) = .5, σ(1) = .731059, σ(2) = .880797. Loss −4/τ σ(τ (ρ − 1)) Â, derivative −4 σ (1 − σ) ρ Â:
    ρ 1, Â 1, τ 1: −4 · .5 = −2 and −4 · .25 = −1, that of −ρ Â. ρ 2, Â 1, τ 1: −4 · .731059 = −2.924234 and
    −8 · .731059 · .268941 = −1.572896. ρ 2, Â −1, τ 2: 2 · .880797 = 1.761594 and 8 · .104994 = .839949."""
    ratio, advantages = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, -1.0])
    term = kernels.SAPO(1.0, 2.0)(ratio.log(), torch.zeros(3), advantages)
    assert term.loss.tolist() == pytest.approx([-2, -2.924234, 1.761594], abs=2e-6)
    assert term.dloss_dlogp.tolist() == pytest.approx([-1, -1.572896, 0.839949], abs=2e-6)


def per_token(objective: Any, log_ratio: list[float], advantages: list[float]) -> Term:
    """The terms of a sequence of these tokens, whose log π is 0, by weights 1."""
    logp, adv = torch.zeros(len(log_ratio)), torch.tensor(advantages)
    p = {"advantages": adv, "sequences": torch.zeros(len(adv)).long(), "token_weights": torch.ones(len(adv))}
    return evaluate(objective, p, logp, logp - torch.tensor(log_ratio))


def test_dppo_and_drpo_worked_by_hand() -> None:
    """μ .5, π .8 (ρ 1.6), then .1 and .2 (2), .6 and .3 (.5): shifts .3, .1, −.3. TV at .2: of Â = 1 the
    first leaves, of Â = −1 the third. KL of the first: .5 ln .625 + .5 ln 2.5 = .2231; of the second:
    .1 ln .5 + .9 ln 1.125 = .0367. DRPO at δ .5, Â = 1: ρ (1 − shift / δ) = 1.6 · .4, 2 · .8, .5 · 1.6; the
    first's J is 1.6 − .5 · .6² = 1.42."""
    new, old, ones = torch.tensor([0.8, 0.2, 0.3]).log(), torch.tensor([0.5, 0.1, 0.6]).log(), torch.ones(3)
    slopes = lambda x, adv: x(new, old, adv).dloss_dlogp.tolist()  # noqa: E731
    assert slopes(kernels.DPPO(), ones) == pytest.approx([0, -2, -0.5], abs=1e-6)
    assert slopes(kernels.DPPO(max_ratio=1.2), -ones) == pytest.approx([1.2, 1.2, 0], abs=1e-6)
    assert slopes(kernels.DPPO(0.03, 0.2, "kl"), ones) == pytest.approx([0, -2, -0.5], abs=1e-6)
    assert slopes(kernels.DPPO(0.2, 0.03, "kl"), ones) == pytest.approx([0, 0, -0.5], abs=1e-6)
    assert slopes(kernels.DRPO(0.5), ones) == pytest.approx([-0.64, -1.6, -0.8], abs=1e-6)
    assert float(kernels.DRPO(0.5)(new, old, ones).loss[0]) == pytest.approx(-1.42, abs=1e-6)


def test_sequence_weights_worked_by_hand() -> None:
    """Log-ratios .5, .1, −.3, of sum .3 and mean .1: e^.3 = 1.349859, e^.1 = 1.105171. VESPO at Â = 1:
    1.349859² e^(3 − 4.049576) = .637898, at −1: 1.349859³ e^(2 − 2.699718) = 1.221748. GMPO clips .5 to .4:
    mean .2/3, e^.0667 = 1.068939."""
    slopes = lambda x, a=1.0: per_token(x, [0.5, 0.1, -0.3], [a] * 3).dloss_dlogp.tolist()  # noqa: E731
    assert slopes(kernels.SequenceTIS()) == pytest.approx([-1.349859] * 3, abs=1e-5)
    assert slopes(kernels.SequenceTIS(1.2)) == pytest.approx([-1.2] * 3, abs=1e-5)
    assert slopes(kernels.SequenceMIS()) == pytest.approx([-1.349859] * 3, abs=1e-5)
    for dropped in (kernels.SequenceMIS(0.5, 1.3), Masked(kernels.TIS(), OutsideBand(1.2))):
        assert slopes(dropped) == [0, 0, 0]
    assert slopes(kernels.GSPO(0.2, 0.2)) == pytest.approx([-1.105171] * 3, abs=1e-5)
    assert slopes(kernels.VESPO()) == pytest.approx([-0.637898] * 3, abs=1e-5)
    assert slopes(kernels.VESPO(), -1.0) == pytest.approx([1.221748] * 3, abs=1e-5)
    assert slopes(kernels.GMPO()) == pytest.approx([0, -1.068939, -1.068939], abs=1e-5)
    deepseek = Masked(kernels.REINFORCE(), OutsideBand(1.2, negative=True))
    assert slopes(deepseek) == [-1, -1, -1] and slopes(deepseek, -1.0) == [0, 0, 0]


def test_masks_over_a_batch_worked_by_hand() -> None:
    """M2PO: pushed outwards are .1, .5 and −.4 with Â −1, of squares .01, .25, .16: mean .14. At most .1:
    without .25 it is .085. At most .04: without .16 too, .01. The −.6 with Â 1 is pushed inwards, and stays.
    Covariance: log π −1, −2, −3, −6 (mean −3), Â 2, 0, −1, −1 (mean 0): 4, 0, 0, 3."""
    m2 = lambda x: per_token(x, [0.1, 0.5, -0.4, -0.6], [1.0, 1.0, -1.0, 1.0])  # noqa: E731
    assert m2(kernels.M2PO(0.14001)).truncated.tolist() == [False] * 4
    assert m2(kernels.M2PO(0.1)).truncated.tolist() == [False, True, False, False]
    assert m2(kernels.M2PO()).truncated.tolist() == [False, True, True, False]
    slopes = [-1.105171, 0, 0, -0.548812]
    assert m2(kernels.M2PO()).dloss_dlogp.tolist() == pytest.approx(slopes, abs=1e-6)
    logp, ones = torch.tensor([0.1, 0.5]), torch.ones(2)
    inputs = logp, 0 * logp, ones, ones.long(), torch.tensor([1.0, 0.0])  # the second is not in the loss
    assert SecondMoment()(*inputs).tolist() == [False, False]
    logp, adv = torch.tensor([-1.0, -2.0, -3.0, -6.0]), torch.tensor([2.0, 0.0, -1.0, -1.0])
    inputs = logp, logp - 0.1, adv, torch.zeros(4).long(), torch.ones(4)
    assert HighCovariance(0.5, 3.5, 5.0)(*inputs).tolist() == [True, False, False, False]
    assert HighCovariance(0.5, 1.0, 3.5)(*inputs).tolist() == [False, False, False, True]
    assert int(HighCovariance(0.25, 1.0, 5.0)(*inputs).sum()) == 1  # of two
    one, two = (kernels.KLCov(share, 3.0).over_sequences(*inputs) for share in (2e-4, 0.5))
    assert one.truncated.tolist() == [True, False, False, False]
    assert two.truncated.tolist() == [True, False, False, True]
    assert one.dloss_dlogp.tolist() == pytest.approx([-2.210342 + 3, 0, 1.105171, 1.105171], abs=1e-6)
    assert float(one.loss[0]) == pytest.approx(-2.210342 + 0.3, abs=1e-6)


@pytest.mark.parametrize("name", [n for n, (x, _) in OBJECTIVES.items() if hasattr(x, "over_sequences")])
def test_tokens_of_weight_0_do_not_matter_to_the_others(name: str) -> None:
    p = without_reference(problem())
    p["token_weights"][::3] = 0
    found = []
    for drop in (True, False):
        p["hidden"][::3] = p["advantages"][::3] = 5.0 * drop
        found.append(ours(p, objective=OBJECTIVES[name][0], drop_masked=drop))
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_the_unbiased_penalty_has_the_gradient_of_the_kl_for_tokens_of_any_generator() -> None:
    """Every token of the vocabulary once, weighted by μ: the expectation over the generator's samples."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(1, H, generator=g).double(), torch.randn(V, H, generator=g).double()
    gen, teacher = torch.randn(2, V, generator=g).double().log_softmax(1)
    weight.requires_grad_()
    log_pi = (hidden @ weight.T).log_softmax(1)[0]
    (expected,) = torch.autograd.grad((log_pi.exp() * (log_pi - teacher)).sum(), weight)
    out = policy_loss(
        hidden.expand(V, H), weight, torch.arange(V), logprobs_gen=gen, advantages=gen, logprobs_ref=teacher,
        token_weights=gen.exp(), objective=kernels.NoReward(), kl=KL(1.0, "unbiased"),
    )  # fmt: skip
    (got,) = torch.autograd.grad(out.loss, weight)
    assert error(got, expected) < 1e-10


def test_gspo_with_uneven_weights_is_differentiated_exactly() -> None:
    p = problem()
    p["token_weights"] = torch.rand(N, generator=torch.Generator().manual_seed(1))
    shared = int((p["sequences"] == p["sequences"].mode().values).nonzero()[0])
    p["token_weights"][shared] = 0  # a masked token is in no mean

    expected = oracle(p, gspo(p["token_weights"].double()), {})
    got = ours(p, objective=kernels.GSPO(0.05, 0.02))
    assert abs(float(got[0] - expected[0])) <= 1e-5
    assert error(got[3], expected[3]) <= 1e-5 and error(got[4], expected[4]) <= 1e-5


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_token_the_generator_gave_no_chance_makes_no_nan(name: str) -> None:
    p = problem()  # vLLM reports −9999 for one; a ratio of infinity times an advantage of 0 would be NaN
    p["logprobs_gen"][:2] = -9999.0
    p["advantages"][0] = 0.0
    out = policy_loss(**without_reference(p), objective=OBJECTIVES[name][0])
    assert bool(out.loss.isfinite())
    assert 0 < float(out.stats["ess"]) <= 1 and bool(out.stats["ratio/max"].isfinite())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: kernels.CISPO(0), "max_ratio is 0"),
        (lambda: kernels.CISPO("4"), "CISPO: max_ratio is '4'; expected a number above 0"),  # type: ignore[arg-type]
        (lambda: KL("x"), "KL: coefficient is 'x'; expected a number"),  # type: ignore[arg-type]
        (lambda: Clip(1.5), "low is 1.5"),
        (lambda: Clip(dual=0.5), "dual is 0.5"),
        (lambda: kernels.IcePop(2.0, 1.0), "low is 2.0, high is 1.0"),
        (lambda: kernels.GSPO(-1.0), "low is -1.0"),
        (lambda: kernels.SAPO(negative=0), "negative is 0"),
        (lambda: kernels.DPPO(divergence="js"), "divergence tv or kl"),  # type: ignore[arg-type]
        (lambda: kernels.DPPO(-0.1), "low is -0.1"),
        (lambda: kernels.DRPO(0), "delta is 0"),
        (lambda: kernels.GMPO(-0.1), "low is -0.1"),
        (lambda: kernels.OverSequences(Clip()), "differentiates its ratio; expected mean=True"),
        (lambda: kernels.OverSequences(kernels.DPPO(), mean=True), "compares probabilities"),
        (lambda: kernels.OutsideBand(2.0, 1.0), "low is 2.0, high is 1.0; expected 0 ≤ low < high"),
        (lambda: kernels.M2PO(-0.1), "threshold is -0.1"),
        (lambda: kernels.KLCov(2.0), "share is 2.0"),
        (lambda: KL(0.1, "k4"), "estimator is 'k4'; expected one of k1, k2, k3, unbiased"),
        (lambda: KL(math.nan), "coefficient is nan"),
    ],
)
def test_settings_that_make_no_sense_are_a_clear_error(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


class Unhashable(kernels.CISPO):
    __hash__ = None  # type: ignore[assignment]  # as of a class that defines __eq__


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": kernels.GMPO()}, "GMPO.* needs sequences"),
        ({"kl": KL(0.1)}, "kl and logprobs_ref go together"),
        ({"kl": 0.1, "logprobs_ref": torch.zeros(13)}, "kl is 0.1; expected a KL, or None"),
        ({"group": "tp"}, "group is 'tp'; expected a ProcessGroup, or None"),
        ({"objective": 3}, "objective is .*; expected an objective such as CISPO"),
        ({"objective": kernels.CISPO}, "objective is .*; expected an objective such as CISPO"),
        ({"objective": kernels.GSPO}, "objective is .*; expected an objective such as CISPO"),
        ({"objective": kernels.GMPO}, "objective is .*; expected an objective such as CISPO"),
        ({"objective": lambda logp, *_: logp}, "expected a Term of loss, .*, given Tensor"),
        ({"objective": lambda x, *_: Term(x.mean(), x, x, x > 0)}, r"each \(13,\) .* given shapes \[\(\),"),
        ({"entropy_bonus": math.nan}, "entropy_bonus is nan"),
        ({"objective": Unhashable()}, "frozen dataclass"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"softcap": "30"}, "softcap is '30'; expected a number"),
        ({"entropy_bonus": "x"}, "entropy_bonus is 'x'; expected a number"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"weight_parts": 4}, "weight_parts is 4"),
        ({"row_kernel": "fast"}, "row_kernel is 'fast'"),
        ({"row_kernel": "single-pass", "softcap": 3.0}, "'single-pass' does not support softcap"),
        ({"row_kernel": "fused-epilogue", "logits_dtype": torch.bfloat16}, "rounds no logits to logits_d"),
        ({"row_kernel": "single-pass", "backend": "torch"}, "needs the backend 'triton'; .* here is 'torch'"),
        ({"backend": "cuda"}, "backend is 'cuda'; expected one of cpu, triton, torch"),
    ],
)
def test_options_that_do_not_go_together_are_a_clear_error(options: dict[str, Any], says: str) -> None:
    p = without_reference(problem())
    del p["sequences"]
    with pytest.raises(ValueError, match=says):
        policy_loss(**p, **options)
