"""The kernel of a chunk's terms in the interpreter, against the same formulas in torch, and its launches."""

import math
from typing import Any

import pytest
import torch
from backends import INTERPRETED
from torch import Tensor

pytest.importorskip("triton")
from kernels import CISPO, GSPO, KL, SAPO, Clip, IcePop, NoReward, chunk_loop, policy_loss
from kernels.head import LMHead
from kernels.objectives import OBJECTIVES
from kernels.rows import Gradient, softmax
from kernels.settings import Settings
from kernels.term import Objective
from kernels.tokens import Tokens
from kernels.triton import backend, terms

pytestmark = INTERPRETED
SHIPPED: list[Any] = [entry.make() for entry in OBJECTIVES.values() if entry.triton]
SHIPPED += [CISPO(math.inf), Clip(0.01, math.inf), IcePop(0.0, math.inf), SAPO(3.0, 0.5)]
SHIPPED = list(dict.fromkeys(SHIPPED))  # grpo and ppo are one
C = 300  # two programs


def tokens(seed: int = 0) -> tuple[Tensor, Tokens]:
    """Statistics of C rows and their inputs: likely and unlikely targets, ratios on both sides of 1."""
    torch.manual_seed(seed)
    anchor, others = torch.randn(C) * 20, torch.rand(C) * torch.logspace(-12, 3, C)
    below = torch.where(torch.rand(C) < 0.3, 0.0, torch.rand(C) * torch.logspace(-3, 2, C).flip(0))
    stats = torch.stack([anchor, others, anchor - below, -others * torch.rand(C) * 5])
    logp = softmax(stats).logp
    gen, ref = (logp + scale * torch.randn(C) for scale in (0.5, 0.3))
    gen[::50], gen[1::50] = (-9999.0, 0.0)  # for the generator impossible, and certain
    weights = torch.rand(C) * (torch.rand(C) > 0.2)
    t = Tokens(
        torch.zeros(C).long(), gen.clamp(max=0.0), torch.randn(C) * (torch.rand(C) > 0.1), weights,
        0.5 + torch.rand(C), ref, None,
    )  # fmt: skip
    return stats, t


def both_ways(stats: Tensor, t: Tokens, settings: Settings) -> list[tuple[Gradient, Any, Tensor]]:
    """(gradient, values, loss) by torch and by the kernel, as the op calls them."""
    found = []
    for fused in (False, True):
        h = torch.empty(C, 1)
        used: Any = backend if fused else object()
        head = LMHead(h, h.shape, used, "triton", torch.float32, settings, 0, 8)
        outputs = chunk_loop.StepOutputs.empty(h, head, False, False)
        terms = chunk_loop.make_terms(head, h, t)
        g = chunk_loop._terms_and_gradient(head, stats, t, outputs, terms, slice(0, C))
        assert bool(outputs.sums) == fused
        found.append((g, outputs, outputs.loss_sum(t.weights)))
    return found


def close(found: Tensor, expected: Tensor, rtol: float, atol: float, name: str) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("penalties", [
    {}, {"kl": KL(0.3, "k1")}, {"kl": KL(0.3, "k2"), "entropy_bonus": 0.02}, {"kl": KL(-0.1, "k3")},
    {"entropy_bonus": -0.5}, {"kl": KL(0.2, "unbiased")},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("objective", SHIPPED, ids=str)
def test_the_kernel_computes_what_the_formulas_in_torch_do(
    objective: Objective, penalties: dict[str, Any]
) -> None:
    stats, t = tokens()
    torch_path, kernel = both_ways(stats, t, Settings(objective, **penalties))
    for name in Gradient.__slots__:
        expected, found = getattr(torch_path[0], name), getattr(kernel[0], name)
        assert (expected is None) == (found is None), name
        if expected is not None:
            close(found, expected, 2e-5, 1e-6, name)
    for name in ("logp", "entropy", "ratio", "kl_ref"):
        expected, found = getattr(torch_path[1], name), getattr(kernel[1], name)
        close(found, expected, 5e-6, 2e-6, name)
    assert torch.equal(torch_path[1].truncated, kernel[1].truncated)
    torch.testing.assert_close(kernel[2], torch_path[2], rtol=1e-4, atol=1e-4)


def test_log_probs_near_0_keep_their_relative_precision() -> None:
    stats, t = tokens()
    stats[2], stats[1] = stats[0], torch.logspace(-13, 1, C)
    (_, _, _), (_, found, _) = both_ways(stats, t, Settings())
    exact = -torch.log1p(stats[1].double())
    assert float(((found.logp - exact) / exact).abs().max()) <= 1e-6


@pytest.mark.parametrize("objective", SHIPPED, ids=str)
def test_nan_is_nan_where_torch_has_it(objective: Objective) -> None:
    stats, t = tokens()
    stats[1, 5] = stats[2, 6] = t.logprobs_gen[7] = t.advantages[8] = t.weights[9] = torch.nan
    (g, values, loss), (kernels_g, kernels_values, kernels_loss) = both_ways(stats, t, Settings(objective))
    for expected, found, names in [
        (g, kernels_g, ("anchor", "a", "dz_y")),
        (values, kernels_values, ("logp", "entropy", "ratio", "truncated")),
    ]:
        for name in names:
            assert torch.equal(getattr(expected, name).isnan(), getattr(found, name).isnan()), name
    assert bool(loss.isnan()) and bool(kernels_loss.isnan())


def test_own_objectives_and_sequence_objectives_take_torchs_path() -> None:
    assert backend.has_terms(Settings(CISPO())) and backend.has_terms(Settings())
    assert not backend.has_terms(Settings(lambda logp, gen, advantages: CISPO()(logp, gen, advantages)))
    assert not backend.has_terms(Settings(GSPO()))

    class Own(CISPO):
        """Its formula may be another."""

    assert not backend.has_terms(Settings(Own()))


def test_a_branch_or_numbers_that_nobody_wrote_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, t = tokens()
    monkeypatch.setitem(terms.TERMS, CISPO, "unwritten")
    with pytest.raises(Exception, match="branch that is not here"):
        both_ways(stats, t, Settings(CISPO()))
    monkeypatch.setitem(terms.TERMS, NoReward, "gate")
    with pytest.raises(TypeError, match="its numbers are missing"):
        both_ways(stats, t, Settings(NoReward()))


@pytest.mark.parametrize("row_kernel", ["two-pass", "single-pass", "fused-epilogue"])
def test_nan_in_a_row_of_weight_0_reaches_nothing(row_kernel: Any) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 16).bfloat16(), torch.randn(50, 16).bfloat16().requires_grad_()
    per_token = dict(logprobs_gen=-torch.rand(9), advantages=torch.randn(9), token_weights=torch.rand(9))
    per_token["token_weights"][3] = 0.0
    y, found = torch.randint(50, (9,)), []
    for bad in (False, True):
        if bad:
            hidden[3], per_token["advantages"][3] = torch.nan, torch.nan
            per_token["logprobs_gen"][3] = torch.inf
        options = {"drop_masked": False, "row_kernel": row_kernel, "backend": "triton", "chunk_rows": 4}
        out = policy_loss(hidden, weight, y, **per_token, **options)
        found.append((out.loss, *torch.autograd.grad(out.loss, weight), *out.stats.values()))
    assert all(torch.equal(x, y) and bool(x.isfinite().all()) for x, y in zip(*found, strict=True))
