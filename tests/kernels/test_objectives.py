"""Promises of the objectives: each is its paper's formula, on every backend and in every mode.

The surrogates here are written again from the papers, for autograd through whole float64 logits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from losses import error, train
from torch import Tensor

from kernels import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    KL,
    REINFORCE,
    SAPO,
    TIS,
    Clip,
    DualClip,
    IcePop,
    Term,
    objectives,
    policy_loss,
)
from kernels.objectives import BuiltIn, SequenceObjective
from kernels.reference import reference_policy_loss
from trainer import cli
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


def gspo(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
    means = {int(i): (logp - gen)[sequences == i].mean() for i in sequences.unique()}
    ratio = torch.stack([means[int(i)] for i in sequences]).exp()
    return -torch.min(ratio * adv, ratio.clamp(1 - 0.05, 1 + 0.02) * adv)


def sapo(logp: Tensor, gen: Tensor, adv: Tensor, _: Tensor) -> Tensor:
    tau = torch.tensor([2.5, 1.5])[(adv > 0).long()]
    return -4 / (tau * (1 + (-tau * ((logp - gen).exp() - 1)).exp())) * adv


OBJECTIVES: dict[str, tuple[Any, Surrogate]] = {
    "CISPO": (CISPO(1.5), cispo(1.5)),
    "REINFORCE": (REINFORCE(), lambda logp, gen, adv, _: -adv * logp),
    "TIS": (TIS(), cispo(2.0)),
    "GRPO": (GRPO(), clip(0.2, 0.2)),
    "DAPO": (DAPO(), clip(0.2, 0.28)),
    "DualClip": (DualClip(), clip(0.2, 0.2, 3.0)),
    "dual clip at 1.1": (Clip(dual=1.1), clip(0.2, 0.2, 1.1)),
    "IcePop": (IcePop(0.6, 1.5), icepop),
    "GSPO": (GSPO(0.05, 0.02), gspo),
    "SAPO": (SAPO(1.5, 2.5), sapo),
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature per token": {"temperature": torch.linspace(0.6, 1.7, N)},
    "soft cap": {"softcap": 3.0, "temperature": 0.8},
    "entropy bonus": {"entropy_bonus": 0.3, "softcap": 5.0, "temperature": 1.3},
    "KL k1": {"kl": KL(0.4, "k1")},
    "KL k2": {"kl": KL(0.4, "k2")},
    "KL k3": {"kl": KL(0.4, "k3"), "entropy_bonus": 0.1},
    "chunks": {"chunk_rows": 4},
}


def kl_estimate(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    log_ratio = logp - ref
    return {"k1": log_ratio, "k2": 0.5 * log_ratio**2, "k3": (-log_ratio).exp() - 1 + log_ratio}[estimator]


def oracle(p: dict[str, Tensor], surrogate: Surrogate, mode: dict[str, Any]) -> list[Tensor]:
    hidden, weight = (p[k].double().requires_grad_() for k in ("hidden", "weight"))
    kl = mode.get("kl")

    def terms(logp: Tensor) -> Tensor:
        out = surrogate(logp, p["logprobs_gen"].double(), p["advantages"].double(), p["sequences"])
        if kl is not None:
            out = out + kl.coefficient * kl_estimate(kl.estimator, logp, p["logprobs_ref"].double())
        return out

    keys = ("entropy_bonus", "temperature", "softcap")
    options = {k: v for k, v in mode.items() if k in keys}
    loss, logp, entropy = reference_policy_loss(
        hidden, weight, p["targets"], p["token_weights"], terms, **options
    )
    return [x.detach() for x in (loss, logp, entropy, *torch.autograd.grad(loss, (hidden, weight)))]


def without_reference(p: dict[str, Tensor]) -> dict[str, Any]:
    return {k: x for k, x in p.items() if k != "logprobs_ref"}


def ours(p: dict[str, Tensor], upstream: float = 1.0, **options: Any) -> list[Tensor]:
    out, dx, dw = train(p if "kl" in options else without_reference(p), upstream, **options)
    return [out.loss.detach(), out.logprobs, out.entropy, dx / upstream, dw / upstream]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OBJECTIVES)
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
    assert share == 0 if name in ("REINFORCE", "SAPO") else 0 < share < 1


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
    logp = (gen + torch.linspace(-1.4, 1.3, N, dtype=torch.float64)).detach()
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


def test_the_table_s_settings_are_fields_of_its_objectives() -> None:
    for entry in objectives.OBJECTIVES.values():
        values = {name: 0.1 + i / 10 for i, name in enumerate(entry.settings.values())}
        changed = entry.make(**values)
        assert {name: getattr(changed, name) for name in values} == values


def test_the_page_s_objective_is_built_in_by_its_class_and_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="loss 'soft_clip': expected one of cispo"):
        cli.parse(["--objective.loss", "soft_clip"])
    (snippet,) = re.findall(r"^```python\n([^`]*class SoftClip.*?)^```", PAGE.read_text(), re.M | re.S)
    namespace = {"Term": Term}
    monkeypatch.setitem(objectives.OBJECTIVES, "soft_clip", BuiltIn(REINFORCE))  # to be taken out again
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
    term = SAPO(1.0, 2.0)(ratio.log(), torch.zeros(3), advantages)
    assert term.loss.tolist() == pytest.approx([-2, -2.924234, 1.761594], abs=2e-6)
    assert term.dloss_dlogp.tolist() == pytest.approx([-1, -1.572896, 0.839949], abs=2e-6)


def test_gspo_with_uneven_weights_is_differentiated_exactly() -> None:
    p = problem()
    p["token_weights"] = torch.rand(N, generator=torch.Generator().manual_seed(1))
    shared = int((p["sequences"] == p["sequences"].mode().values).nonzero()[0])
    p["token_weights"][shared] = 0  # a masked token is in no mean

    def surrogate(logp: Tensor, gen: Tensor, adv: Tensor, sequences: Tensor) -> Tensor:
        w = p["token_weights"].double()
        means = {}
        for i in sequences.unique():
            mine = sequences == i
            means[int(i)] = (w * (logp - gen))[mine].sum() / w[mine].sum()
        ratio = torch.stack([means[int(i)] for i in sequences]).exp()
        return -torch.min(ratio * adv, ratio.clamp(1 - 0.05, 1 + 0.02) * adv)

    expected = oracle(p, surrogate, {})
    got = ours(p, objective=GSPO(0.05, 0.02))
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


def test_the_penalty_is_reported_without_its_coefficient() -> None:
    p = problem()
    arguments: dict[str, Any] = dict(p)
    out = policy_loss(**arguments, kl=KL(7.0, "k3"))
    logp = oracle(p, OBJECTIVES["CISPO"][1], {})[1]
    expected = kl_estimate("k3", logp, p["logprobs_ref"].double()).mean()
    assert float(out.stats["kl/ref"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CISPO(0), "max_ratio is 0"),
        (lambda: Clip(1.5), "low is 1.5"),
        (lambda: Clip(dual=0.5), "dual is 0.5"),
        (lambda: IcePop(2.0, 1.0), "low is 2.0, high is 1.0"),
        (lambda: GSPO(-1.0), "low is -1.0"),
        (lambda: SAPO(negative=0), "negative is 0"),
        (lambda: KL(0.1, "k4"), "estimator is 'k4'; expected one of k1, k2, k3"),
        (lambda: KL(math.nan), "coefficient is nan"),
    ],
)
def test_settings_that_make_no_sense_are_a_clear_error(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": GSPO()}, "GSPO needs sequences"),
        ({"kl": KL(0.1)}, "kl and logprobs_ref go together"),
        ({"objective": 3}, "objective: expected an objective such as CISPO"),
        ({"objective": CISPO}, "objective: expected an objective such as CISPO"),
        ({"objective": GSPO}, "objective: expected an objective such as CISPO"),
        ({"objective": lambda logp, *_: logp}, "expected a Term of loss, .*, given Tensor"),
        ({"objective": lambda x, *_: Term(x.mean(), x, x, x > 0)}, r"each \(13,\) .* given shapes \[\(\),"),
        ({"entropy_bonus": math.nan}, "entropy_bonus is nan"),
        (
            {"objective": type("Own", (), {"__call__": lambda *_: None, "__hash__": None})()},
            "frozen dataclass",
        ),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"weight_parts": 4}, "weight_parts is 4"),
        ({"row_kernel": "fast"}, "row_kernel is 'fast'"),
        ({"row_kernel": "single-pass", "softcap": 3.0}, "'single-pass' does not support softcap"),
        (
            {"row_kernel": "fused-epilogue", "logits_dtype": torch.bfloat16},
            "no logits to round to logits_dtype",
        ),
        (
            {"row_kernel": "single-pass", "backend": "torch"},
            "'single-pass' needs the backend 'triton'; .* here is 'torch'",
        ),
        ({"backend": "cuda"}, "backend is 'cuda'; expected one of cpu, triton, torch"),
    ],
)
def test_options_that_do_not_go_together_are_a_clear_error(options: dict[str, Any], says: str) -> None:
    p = without_reference(problem())
    del p["sequences"]
    with pytest.raises(ValueError, match=says):
        policy_loss(**p, **options)
