"""Promises of the fused loss: exact against a float64 oracle, never the whole logits, clear errors."""

import math
import re
import warnings
from typing import Any

import losses
import pytest
import torch
from backends import BACKENDS, TAKE_FP16
from losses import Watch, error, exact, leaves, rounded, spy, train
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import CISPO, KL, backends, head, linear_logprob, policy_loss, scoring, torch_backend
from kernels import op as op_module
from kernels.settings import Settings

pytestmark = pytest.mark.usefixtures("isa")  # the default backend of CPU tensors is the native one
no_native = pytest.mark.parametrize("isa", ["none"])  # once for all instruction sets: other backends


def problem(n: int = 37, h: int = 13, v: int = 101, seed: int = 0) -> dict[str, Tensor]:
    return losses.problem(n, h, v, seed=seed, noise=0.8, dtype=torch.float32)  # products of all digits


@pytest.mark.parametrize("shape", [(1, 1, 2), (37, 13, 101), (130, 31, 997)])
@pytest.mark.parametrize("max_ratio", [0.7, 4.0, math.inf])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "per token"])
def test_loss_logp_entropy_and_gradients_equal_the_float64_exact(
    shape: tuple[int, int, int], max_ratio: float, temperature: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 50 * shape[2] * 4)  # several chunks
    monkeypatch.setattr(torch_backend, "CACHED_BYTES", 16 * shape[2] * 4)  # of several parts
    p = problem(*shape)
    if temperature == "per token":
        temperature = torch.linspace(0.5, 2.0, shape[0])
    out, dx, dw = train(p, 0.37, objective=CISPO(max_ratio), temperature=temperature)
    loss, logp, entropy, dx64, dw64 = exact(p, 0.37, max_ratio=max_ratio, temperature=temperature)
    assert abs(out.loss.item() - loss.item()) <= 2e-6 * max(1.0, abs(loss.item()))
    assert float((out.logprobs - logp).abs().max()) < 5e-6
    assert float((out.entropy - entropy).abs().max()) < 1e-5
    assert error(dx, dx64) < 5e-6 and error(dw, dw64) < 5e-6
    assert out.loss.dtype == torch.float32


def test_two_tokens_by_hand() -> None:
    # V = 2, z = (0, ln 3): π = (1/4, 3/4). Token 1: y = 1, π_gen = 1/4 → ρ = 3, bound 2.
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    out = policy_loss(
        hidden, weight, torch.tensor([1, 0]), logprobs_gen=torch.tensor([0.25, 0.5]).log(),
        advantages=torch.tensor([1.0, -2.0]), token_weights=torch.tensor([0.5, 0.5]), objective=CISPO(2.0),
    )  # fmt: skip
    # −½·2·1·ln ¾ − ½·½·(−2)·ln ¼ ; coefficients c = −1 and +½
    assert out.loss.item() == pytest.approx(-math.log(0.75) + 0.5 * math.log(0.25), rel=1e-6)
    out.loss.backward()
    # dz = c (onehot − π): token 1: −1·(−¼, ¼), token 2: ½·(¾, −¾); dW sums them
    assert weight.grad is not None and hidden.grad is not None
    assert weight.grad[:, 0].tolist() == pytest.approx([0.25 + 0.375, -0.25 - 0.375], rel=1e-6)
    assert hidden.grad[:, 0].tolist() == pytest.approx([-0.25 * math.log(3), -0.375 * math.log(3)], rel=1e-6)
    assert float(out.stats["ratio/max"]) == pytest.approx(3.0, rel=1e-6)
    assert float(out.stats["ratio/truncated"]) == 0.5


def test_float64_states_are_computed_in_float64_throughout() -> None:
    p = {k: x.double() if x.is_floating_point() else x for k, x in problem().items()}
    out, dx, dw = train(p)
    found = (out.loss, out.logprobs, out.entropy, dx, dw)
    for ours, expected in zip(found, exact(p), strict=True):
        assert ours.dtype == torch.float64 and error(ours.detach(), expected) < 1e-13


def test_masked_tokens_cost_nothing_and_change_nothing() -> None:
    p = problem(20)
    p["token_weights"][5:12] = 0
    kept = {k: torch.cat([x[:5], x[12:]]) if len(x) == 20 else x for k, x in p.items()}
    for key, junk in {"hidden": math.nan, "targets": -100, "logprobs_gen": math.nan}.items():
        p[key][5:12] = junk  # whatever a masked token holds is not looked at
    p["targets"] = p["targets"].int()
    out, dx, dw = train(p)
    small, dx_small, dw_small = train(kept)
    assert torch.equal(out.loss, small.loss) and torch.equal(dw, dw_small)
    assert torch.equal(torch.cat([dx[:5], dx[12:]]), dx_small) and not dx[5:12].any()
    assert not out.logprobs[5:12].any() and not out.entropy[5:12].any()
    assert torch.equal(out.stats["entropy"], small.stats["entropy"])


@pytest.mark.parametrize("drop_masked", [True, False])
@pytest.mark.parametrize("n", [0, 4])
def test_no_token_in_the_loss_gives_zeros(n: int, drop_masked: bool) -> None:
    p = problem(n)
    p["token_weights"].zero_()
    out, *gradients = train(p, drop_masked=drop_masked)
    results = [out.loss, out.logprobs, out.entropy, *out.stats.values(), *gradients]
    assert not any(bool(x.any()) for x in results)


@pytest.mark.parametrize("backend", ["torch", None])
def test_no_tensor_is_larger_than_a_chunk_of_logits(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, v = 500, 211
    monkeypatch.setattr(head, "CHUNK_BYTES", 64 * v * 4)
    monkeypatch.setattr(op_module, "policy_loss", op_module.compute)  # a custom op hides what it calls
    monkeypatch.setattr(scoring, "score", scoring.compute)
    p = problem(n, 7, v)
    with Watch() as watch:
        policy_loss(**leaves(p), backend=backend)
        linear_logprob(p["hidden"], p["weight"], p["targets"], backend=backend)
    assert watch.largest == 64 * v
    inputs = p["hidden"], p["weight"], p["targets"], torch.ones(n)
    settings = scoring._settings(None, torch.float32, False, 3, None, None, backend)
    stats = scoring.compute(*inputs, settings)[-1]
    with Watch() as watch:
        scoring.compute_gradients(*inputs, stats, torch.ones(n), None, True, True, settings)
    assert watch.largest == 64 * v


def test_without_gradients_there_is_one_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "policy_loss", op_module.compute)  # a custom op hides what it calls
    p = problem()
    q = leaves(p)
    with torch.no_grad(), Watch() as watch:
        loss = policy_loss(**q, backend="torch").loss
    assert len([name for name, _ in watch.ops if re.search("mm|zeros_like", name)]) == 1
    monkeypatch.undo()
    assert torch.equal(loss, train(p, backend="torch")[0].loss)


def test_autocast_rounds_what_is_multiplied_as_linear_layers_do_and_not_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, p = list[Any](), problem()
    half = rounded(p)
    expected, *gradients = train(half)
    spy(monkeypatch, head, "choose", lambda h, w, name: chosen.append((h.dtype, w.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        out, *cast = train(p)
        scored = linear_logprob(p["hidden"], p["weight"], p["targets"])
        in_float64 = train(p | {k: p[k].double() for k in ("hidden", "weight")})[1]
    assert chosen == [(torch.bfloat16,) * 2] * 2 + [(torch.float64,) * 2]
    assert in_float64.dtype == torch.float64
    for logp, entropy in ((out.logprobs, out.entropy), scored[:2]):
        assert torch.equal(logp, expected.logprobs) and torch.equal(entropy, expected.entropy)
    assert float((out.logprobs - exact(half)[1]).abs().max()) < 5e-6
    for x, y in zip(cast, gradients, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y.float())


def test_fp32_on_cuda_is_warned_of_once_with_its_cost() -> None:
    backends.notice.cache_clear()
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype in (torch.bfloat16, torch.float32, torch.float32):
            x = torch.empty(2, 8, dtype=dtype, device="cuda")
            head.LMHead.prepare(x, x, torch.float32, Settings(backend="torch"), 0)
    assert len(caught) == 1 and "15 times as slow" in str(caught[0].message)
    assert "under torch.autocast" in str(caught[0].message)


def test_bf16_inputs_get_bf16_gradients_of_fp32_logits() -> None:
    p = rounded(problem(200, 31, 301))
    out, dx, dw = train(p)
    _, logp, _, dx64, dw64 = exact(p)
    assert float((out.logprobs - logp).abs().max()) < 5e-6
    assert dx.dtype == dw.dtype == torch.bfloat16
    assert error(dx, dx64) < 2.5e-3 and error(dw, dw64) < 2.5e-3  # one rounding: 2⁻⁹/√3 rms, 2⁻⁹ at most


def test_an_upstream_gradient_is_not_rounded_to_bf16_with_the_gradients() -> None:
    p = problem(64)
    p |= {k: p[k].bfloat16() for k in ("hidden", "weight")}
    third = torch.tensor(1 / 3)  # 0.33398 in bf16, which would make all gradients 2e-3 too long
    # the gradients that the forward stored, times the FP32 number, rounded once
    for scaled, stored in zip(train(p, 1 / 3)[1:], train(p)[1:], strict=True):
        assert torch.equal(scaled, (stored.float() * third).bfloat16())
        assert not torch.equal(scaled, stored * third.bfloat16())


@no_native
@pytest.mark.parametrize("backend", TAKE_FP16)
@pytest.mark.parametrize("options", [
    {}, {"chunk_rows": 5}, {"exact": True}, {"entropy_bonus": 0.3}, {"softcap": 3.0, "temperature": 0.7},
], ids=str)  # fmt: skip
def test_fp16_gradients_outlive_a_loss_scale(backend: str, options: dict[str, Any]) -> None:
    """GradScaler starts at 65536, which FP16 has not, and is there for gradients that FP16 has not either.

    Those of one chunk may be 1e5 times as large as those of the next, and weigh as much in one token's.
    """
    p = rounded(problem(), torch.float16)
    p["token_weights"] *= torch.logspace(-5, -10, 37)[torch.randperm(37)] if "chunk_rows" in options else 1e-5
    out, dx, dw = train(p, 65536.0, backend=backend, **options)
    oracle = {k: x for k, x in options.items() if k not in ("chunk_rows", "exact")}
    _, logp, _, dx64, dw64 = exact(p, 65536.0, **oracle)
    assert dx.dtype == dw.dtype == torch.float16 and out.loss.dtype == torch.float32
    assert float((out.logprobs - logp).abs().max()) < 5e-6
    assert error(dx, dx64) < 5e-4 and error(dw, dw64) < 5e-4


def test_fp16_gradients_of_logits_that_no_unit_scales_stay_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    types: list[torch.dtype] = []
    plain = torch_backend.row_grads
    # on CUDA this backend rounds to the type that it is given
    monkeypatch.setattr(torch_backend, "row_grads", lambda *a: types.append(a[-1]) or plain(*a))
    train(rounded(problem(), torch.float16), backend="torch")
    assert set(types) == {torch.float32}


@no_native
@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed")
def test_rows_of_small_fp16_gradients_keep_their_digits_beside_large_ones() -> None:
    p = rounded(problem(), torch.float16)
    p["token_weights"] = torch.logspace(0, -6, 37)
    dx, dx64 = train(p, 2.0**12, backend="triton")[1], exact(p, 2.0**12)[3]
    by_row = (dx - dx64).norm(dim=1) / dx64.norm(dim=1)
    assert float(by_row.max()) < 1e-3  # FP16 itself ends at 6e-8


def test_scoring_equals_the_loss_own_logprobs_and_takes_bf16() -> None:
    p = problem()
    out, *_ = train(p, temperature=0.7)
    with torch.inference_mode():
        inferred = policy_loss(**p, temperature=0.7)  # type: ignore[arg-type]  # every argument is a tensor
        scored = linear_logprob(p["hidden"], p["weight"], p["targets"], temperature=0.7)
    for result in (inferred, scored):
        assert torch.equal(result.logprobs, out.logprobs) and torch.equal(result.entropy, out.entropy)
    assert not inferred.loss.requires_grad
    hidden, weight = p["hidden"].bfloat16(), p["weight"].bfloat16()
    logp, *_ = linear_logprob(hidden, weight, p["targets"])
    logp64 = exact(p | {"hidden": hidden, "weight": weight})[1]
    assert float((logp - logp64).abs().max()) < 5e-6  # bf16 products are exact in FP32
    rounded, *_ = linear_logprob(hidden, weight, p["targets"], logits_dtype=torch.bfloat16)
    assert float((rounded - logp64).abs().max()) > 1e-3  # what the FP32 head avoids


def test_statistics_are_those_of_the_definition() -> None:
    p, ref = problem(), {"logprobs_ref": problem(seed=1)["logprobs_gen"]}
    out, *_ = train(p | ref, objective=CISPO(2.0), kl=KL(7.0, "k3"))
    logp = exact(p)[1]
    log_ratio, to_ref = logp - p["logprobs_gen"], logp - ref["logprobs_ref"]
    ratio = log_ratio.exp()
    for key, expected in {
        "ratio/mean": ratio.mean(), "ratio/max": ratio.max(), "ratio/min": ratio.min(),
        "ratio/truncated": (ratio > 2).double().mean(), "kl/k1": -log_ratio.mean(),
        "kl/ref": ((-to_ref).exp() - 1 + to_ref).mean(),  # without its coefficient
        "kl/k3": (ratio - 1 - log_ratio).mean(), "ess": ratio.sum() ** 2 / (37 * (ratio**2).sum()),
    }.items():  # fmt: skip
        assert float(out.stats[key]) == pytest.approx(float(expected), rel=1e-4), key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": torch.zeros(37, 12)}, r"hidden \(N, H\), .* given \(37, 12\) and \(101, 13\)"),
        ({"targets": torch.full((37,), 101)}, "ids from 101 to 101; expected 0 to 100"),
        ({"targets": torch.full((37,), -100)}, "expected 0 to 100"),
        ({"targets": torch.zeros(37)}, "targets: expected int64 or int32, given torch.float32"),
        ({"advantages": [1.0] * 37}, "advantages: expected a tensor, given list"),
        ({"hidden": torch.zeros(1, 37, 13)}, "leading dimensions flattened"),
        (
            {"weight": torch.zeros(0, 13)},
            r"weight \(V, H\) has shape \(0, 13\); expected V and H of at least",
        ),
        ({"hidden": torch.zeros(37, 0), "weight": torch.zeros(101, 0)}, "expected V and H of at least 1"),
        ({"weight": None}, "weight: expected a tensor, given NoneType"),
        ({"logprobs_gen": None}, "logprobs_gen: expected a tensor, given NoneType"),
        ({"advantages": torch.zeros(36)}, r"advantages: expected shape \(37,\)"),
        ({"advantages": torch.full((37,), math.nan)}, "advantages holds NaN"),
        ({"weight": torch.full((101, 13), math.nan)}, "weight holds NaN"),
        ({"logits_dtype": torch.int64}, "logits_dtype: expected float32, bfloat16 or float16"),
        ({"logits_dtype": torch.float64}, "logits_dtype: expected float32, bfloat16 or float16"),
        ({"hidden": torch.zeros(37, 13, device="meta")}, "weight is on cpu, hidden on meta"),
        ({"hidden": torch.full((37, 13), math.inf)}, "hidden holds NaN or infinity"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": torch.zeros(37)}, "temperature holds values that are not finite and above 0"),
        ({"temperature": torch.ones(3)}, "temperature: expected a number or shape"),
    ],
)
def test_wrong_input_is_a_clear_error(change: dict[str, Any], says: str) -> None:
    p = problem() | change
    with pytest.raises(ValueError, match=says):
        policy_loss(p.pop("hidden"), p.pop("weight"), p.pop("targets"), **p)
