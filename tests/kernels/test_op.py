"""Promises of the op as a citizen of torch: compiled, checkpointed, repeatable, of any size."""

import gc
import math
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from backends import BACKENDS
from losses import LOSSES, TRACED, Watch, error, exact, leaves, problem, rounded, run, spy
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import kernels
from kernels import CISPO, GSPO, KL, SAPO, Term, head, linear_logprob, policy_loss, torch_backend
from kernels import op as op_module
from kernels.precision import ieee_fp32
from kernels.reference import reference_loss
from kernels.settings import Settings, register

on_both = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
BATCH_INVARIANT = [name for name in BACKENDS if name != "torch"]  # MKL's products are not


def own(logp: Tensor, logprobs_gen: Tensor, advantages: Tensor) -> Term:
    return Term(-advantages * logp, -advantages, torch.exp(logp - logprobs_gen), logp > 0)


STEPS: dict[str, dict[str, Any]] = {
    "default": {},
    "CISPO": {"objective": CISPO(1.3)},
    "GSPO": {"objective": GSPO()},
    "own": {"objective": own},
    "scoring": {"temperature": 0.7, "softcap": 5.0},
}


@pytest.mark.parametrize("name", STEPS)
def test_compiled_without_a_graph_break_it_gives_the_same_bits(name: str) -> None:
    torch._dynamo.reset()
    p = problem() | {"sequences": torch.arange(23) // 5}
    p["token_weights"][3] = 0

    def step(scale: Tensor, **q: Any) -> tuple[Tensor, Tensor]:
        h, w, y = q.pop("hidden") * scale, q.pop("weight"), q.pop("targets")
        if name == "scoring":
            scored = linear_logprob(h, w, y, **STEPS[name])
            return (scored.logprobs * q["advantages"] - 0.1 * scored.entropy).sum(), scored.logsumexp
        out = policy_loss(h, w, y, **STEPS[name], **q)
        return 2 * out.loss, out.stats["entropy"] + out.logprobs.sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=TRACED, backend="aot_eager")):
        q = leaves(p)
        loss, other = function(torch.tensor(1.5), **q)
        loss.backward()
        results.append([loss.detach(), other, q["hidden"].grad, q["weight"].grad])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


def test_compiled_functions_tell_own_objectives_of_the_same_code_apart() -> None:
    torch._dynamo.reset()

    def scaled(scale: float) -> Any:
        return lambda logp, gen, adv: Term(-scale * adv * logp, -scale * adv, logp.exp(), logp > 0)

    p = problem()
    loss = lambda objective: policy_loss(**p, objective=objective).loss  # type: ignore[arg-type]  # noqa: E731
    step = torch.compile(loss, fullgraph=TRACED, backend="aot_eager")
    objectives = [scaled(1.0), scaled(3.0)]
    losses = [float(step(objective)) for objective in objectives]
    assert losses[1] == pytest.approx(3 * losses[0], rel=1e-6) and losses[0] != 0


def test_an_own_objective_and_what_it_holds_is_not_kept_for_good() -> None:
    p = problem()
    shift = torch.zeros(())
    alive = weakref.ref(shift)
    policy_loss(**p, objective=lambda x, *_, s=shift: Term(x + s, x, x.exp(), x > 0))  # type: ignore[arg-type]  # tensors
    del shift
    gc.collect()
    assert alive() is None


def test_threads_get_the_objective_they_asked_for() -> None:
    p, wrong = problem(), []

    def work(i: int) -> None:
        for j in range(20):
            value = 1.0 + i + j / 32
            constant = lambda x, *_, v=value: Term(x * 0 + v, x * 0, x.exp(), x > 0)  # noqa: E731
            out = policy_loss(**p, objective=constant)  # type: ignore[arg-type]  # tensors
            wrong.extend([value] if abs(float(out.loss) / value / total - 1) > 1e-5 else [])

    total = float(p["token_weights"].sum())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not TRACED, reason="the op is left out of the graph, and right")
def test_an_objective_made_inside_a_compiled_function_is_refused_not_mistaken() -> None:
    torch._dynamo.reset()
    p = problem()

    def step(q: dict[str, Tensor]) -> Tensor:
        return policy_loss(**q, objective=CISPO(0.01)).loss  # type: ignore[arg-type]  # every argument is a tensor

    with pytest.raises(Exception, match="max_ratio"):
        torch.compile(step, fullgraph=TRACED, backend="aot_eager")(p)


def test_the_custom_op_keeps_torchs_rules_for_custom_ops() -> None:
    p = leaves(problem())
    args = op_module.Arguments(
        **p, inverse_temperature=torch.ones(23), logprobs_ref=None, sequences=None, needs_hidden=True,
        needs_weight=True, objective=register(CISPO()), kl=0, entropy_bonus=0.0, softcap=None,
        logits_dtype=torch.float32, exact=False, weight_parts=3, row_kernel="two-pass", chunk_rows=None,
        drop_masked=True, group=0, backend="torch",
    )  # fmt: skip
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(op_module.policy_loss, args, test_utils=tests)


@on_both
def test_checkpointed_or_from_a_retained_graph_the_gradients_are_the_same_bits(
    loss: Callable[..., Tensor], backend: str
) -> None:
    p, results = problem(), []
    body = nn.Linear(13, 13, bias=False)
    for way in ("plain", "retained", "use_reentrant", "checkpoint"):
        q = leaves(p)
        body.zero_grad()
        inputs = q["hidden"], q["weight"]
        step = lambda h, w, q=q: loss(body(h), w, q, backend=backend)  # noqa: E731
        if way in ("plain", "retained"):
            out = step(*inputs)
        else:
            out = checkpoint(step, *inputs, use_reentrant=way == "use_reentrant")
        if way == "retained":
            torch.autograd.grad(2 * out, inputs, retain_graph=True)
        out.backward()
        results.append([*(x.grad for x in inputs), body.weight.grad])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_gradients_that_nobody_needs_afterwards_are_not_copied(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []
    empty = head.LMHead.empty_gradients

    def spied(*args: Any) -> Any:
        made.extend(gradients := empty(*args))
        return gradients

    monkeypatch.setattr(head.LMHead, "empty_gradients", spied)
    q, plain = leaves(problem()), leaves(problem())
    (factor * policy_loss(**q).loss).backward()
    for made_one, leaf in zip(made, (q["hidden"], q["weight"]), strict=True):
        assert leaf.grad.data_ptr() == made_one.data_ptr() and not leaf.grad.requires_grad
    inputs = plain["hidden"], plain["weight"]
    copied = torch.autograd.grad(factor * policy_loss(**plain).loss, inputs, retain_graph=True)
    assert torch.equal(copied[0], q["hidden"].grad) and torch.equal(copied[1], q["weight"].grad)
    freed = torch.autograd.grad(policy_loss(**plain).loss, inputs)
    assert not any(x.requires_grad for x in freed)  # the op's own tensors have a history


def test_the_rows_of_a_chunk_follow_the_free_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the paper's head 8,192 rows of FP32 logits take 4.98 GB, and dW as much."""
    hidden, free = MagicMock(is_cuda=True, dtype=torch.bfloat16), {"cuda": 0, "unused": 0}
    hidden.__len__.return_value = 1 << 20
    weight = torch.empty(151936, 4096, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free["cuda"], 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: free["unused"] + 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)
    rows = partial(head.rows_on_cuda, hidden, weight)
    for cuda, unused, times in ((0, 0, 1), (24, 0, 1), (25, 0, 2), (5, 20, 2), (66, 0, 6)):
        free |= {"cuda": cuda * 10**9, "unused": unused * 10**9}
        assert rows(Settings()) == times * 8192
    assert rows(Settings(row_kernel="fused-epilogue")) == 98304  # only bf16
    assert rows(Settings(group=Mock(dist.ProcessGroup))) == rows(Settings(exact=True)) == 8192
    assert head.rows_on_cuda(hidden, weight.float(), Settings()) == 8192  # parts, as large as the logits
    hidden.__len__.return_value = 8192
    assert rows(Settings()) == 8192


@on_both
def test_differentiating_twice_is_refused(loss: Callable[..., Tensor]) -> None:
    q, scale = leaves(problem()), torch.tensor(2.0, requires_grad=True)
    out = loss(q["hidden"], q["weight"], q) * scale
    (first,) = torch.autograd.grad(out, q["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        first.sum().backward()


@on_both
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_a_forward_mode_derivative_is_refused_not_zero(loss: Callable[..., Tensor], name: str) -> None:
    p = problem()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        q = p | {name: forward_ad.make_dual(p[name], p[name])}
        loss(q["hidden"], q["weight"], q)


@on_both
@pytest.mark.parametrize("name", ["hidden", "weight"])
def test_a_frozen_part_gets_no_gradient_and_none_is_computed(
    loss: Callable[..., Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[tuple[bool, bool]] = []
    spy(monkeypatch, head.LMHead, "empty_gradients", lambda self, h, *needs: needed.append(needs))
    whole, frozen = leaves(problem()), leaves(problem())
    frozen[name].requires_grad_(False)
    for q in (whole, frozen):
        loss(q["hidden"], q["weight"], q).backward()
    other = "weight" if name == "hidden" else "hidden"
    assert needed == [(True, True), (name != "hidden", name != "weight")]
    assert frozen[name].grad is None and torch.equal(frozen[other].grad, whole[other].grad)


def test_tied_embeddings_get_both_gradients(backend: str) -> None:
    p = problem()
    table = p["weight"].clone().requires_grad_()
    ids = torch.arange(23) % 61
    rest = {k: x for k, x in p.items() if k not in ("hidden", "weight")}
    policy_loss(table[ids], table, **rest, backend=backend, exact=True).loss.backward()  # type: ignore[arg-type]  # tensors
    table64 = p["weight"].double().requires_grad_()
    loss = reference_loss(table64[ids], table64, **rest, max_ratio=4.0)[0]
    assert table.grad is not None
    assert error(table.grad, torch.autograd.grad(loss, table64)[0]) < 1e-5


def test_two_runs_give_the_same_bits(backend: str) -> None:
    p = problem(40)
    first, second = (run(p, backend=backend, chunk_rows=16, entropy_bonus=0.1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", BATCH_INVARIANT, indirect=True)
def test_a_tokens_logprob_does_not_depend_on_its_neighbours(backend: str) -> None:
    p = problem(17, 37, 131) if backend == "cpu" else problem(17, 19, 67)  # two tiles each way in both
    # the interpreter is slow: there, around the ends of chunks (5) and tiles (16)
    sizes = range(1, 18) if backend == "cpu" else (1, 2, 4, 5, 6, 15, 16)

    def score(rows: Tensor) -> Tensor:
        out = linear_logprob(p["hidden"][rows], p["weight"], p["targets"][rows], backend=backend)
        return torch.stack([out.logprobs, out.entropy])

    def train(rows: Tensor) -> Tensor:
        q = {k: x if k == "weight" else x[rows] for k, x in p.items()}
        _, logp, entropy, *_ = run(q, backend=backend, chunk_rows=5)
        return torch.stack([logp, entropy])

    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    for function in (score, train):
        everything = function(torch.arange(17))
        for n in sizes:
            assert torch.equal(function(torch.arange(n)), everything[:, :n])
        assert torch.equal(function(order), everything[:, order])
    if backend == "cpu":  # its scoring and its training are the same sums, too
        assert torch.equal(score(order), train(order))


@pytest.mark.parametrize("shape", [(0, 5, 7), (1, 1, 1), (1, 3, 2), (3, 1, 17), (2, 257, 3), (5, 31, 1031)])
def test_every_size_is_right(backend: str, shape: tuple[int, int, int]) -> None:
    p = problem(*shape)
    loss, logp, entropy, *grads = run(p, backend=backend, exact=True)
    loss64, logp64, entropy64, *grads64 = exact(p)
    assert abs(float(loss - loss64)) <= 2e-6
    if shape[0]:
        assert float((logp - logp64).abs().max()) <= 5e-6 and float((entropy - entropy64).abs().max()) <= 1e-5
    for ours, expected in zip(grads, grads64, strict=True):
        assert float((ours - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-9


# Triton's interpreter is too slow for as many rows
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"], indirect=True)
def test_more_than_65536_tokens_are_right_to_the_last(backend: str) -> None:
    p = problem(65_536 + 37, 4, 5)
    _, logp, _, dx, dw = run(p, backend=backend)
    _, logp64, _, dx64, dw64 = exact(p)
    assert float((logp - logp64).abs().max()) <= 5e-6
    assert error(dx, dx64) <= 1e-5 and error(dw, dw64) <= 1e-5


def test_peaked_rows_distant_targets_and_offsets_keep_their_precision(backend: str) -> None:
    # one hidden unit of value 1: the logits are the weights
    cases = [
        ([30.0, 0.0, -5.0], 0, None), ([13.0, 0.0, 0.0], 0, None), ([0.0, -80.0, 3.0], 1, -83.0485873516),
        ([1e4, 1e4 - 2, 1e4 - 1], 2, -1.4076059644), ([-1e4, -1e4 + 2, -1e4 + 1], 2, -1.4076059644),
        ([0.0, -200.0], 1, -200.0), ([-3e4, 3e4], 0, -6e4), ([-3e4, 3e4], 1, 0.0),
    ]  # fmt: skip
    rel = 1e-5 if backend == "triton" else 2e-6
    for z, target, expected in cases:
        weight = torch.tensor(z)[:, None].requires_grad_()
        one = torch.ones(1)
        out = policy_loss(
            one[None], weight, torch.tensor([target]), logprobs_gen=one * 0, advantages=one,
            token_weights=one, objective=own, backend=backend, exact=True,
        )  # fmt: skip
        if expected is None:  # float64 log_softmax loses these
            others = sum(math.exp(x - z[target]) for i, x in enumerate(z) if i != target)
            expected = -math.log1p(others)
            assert -1e-5 < expected < -9e-14
        assert float(out.logprobs) == pytest.approx(expected, rel=rel, abs=0)
        scored, *_ = linear_logprob(one[None], weight.detach(), torch.tensor([target]), backend=backend)
        assert float(scored) == pytest.approx(expected, rel=rel, abs=0)
        out.loss.backward()
        assert weight.grad is not None
        assert float(weight.grad[target]) == pytest.approx(math.expm1(expected), rel=rel, abs=0)


def test_a_certain_tokens_entropy_keeps_its_relative_precision(backend: str) -> None:
    one, gap = torch.ones(1, 1), 20.0  # π = (1 − q, q): the entropy is q (gap + 1) to within q²
    _, entropy, *_ = linear_logprob(one, torch.tensor([[gap], [0.0]]), torch.tensor([0]), backend=backend)
    assert float(entropy) == pytest.approx(math.exp(-gap) * (gap + 1), rel=1e-5, abs=0)


def test_integer_operands_give_the_exact_logits(backend: str) -> None:
    # integers below 2⁸ have exact products and sums: log-probs depend on the softmax alone
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randint(-2, 3, shape, generator=g).float() for shape in ((9, 300), (41, 300)))
    targets = torch.randint(41, (9,), generator=g)
    logp, *_ = linear_logprob(hidden, weight, targets, backend=backend)
    expected = torch.log_softmax(hidden.double() @ weight.double().T, 1)[torch.arange(9), targets]
    assert float(((logp - expected) / expected).abs().max()) <= 4e-7


def test_a_fault_in_the_data_is_named_on_every_backend(backend: str) -> None:
    for name, value, says in (
        ("hidden", math.nan, "hidden holds NaN"), ("weight", math.nan, "weight holds NaN"),
        ("targets", 61, "ids from"), ("logprobs_gen", math.inf, "logprobs_gen holds NaN or infinity"),
    ):  # fmt: skip
        p = problem()
        p[name].view(-1)[5] = value
        with pytest.raises(ValueError, match=says):
            policy_loss(**p, backend=backend)  # type: ignore[arg-type]  # every argument is a tensor
        if name != "logprobs_gen":
            with pytest.raises(ValueError, match=says):
                linear_logprob(p["hidden"], p["weight"], p["targets"], backend=backend)


def test_strided_inputs_are_right(backend: str) -> None:
    p = problem()
    wide = torch.randn(23, 26)
    wide[:, ::2] = p["hidden"]
    plain = run(p, backend=backend)
    for hidden in (wide[:, ::2], p["hidden"].t().contiguous().t()):
        q = p | {"hidden": hidden, "weight": p["weight"].t().contiguous().t()}
        for strided, expected in zip(run(q, backend=backend), plain, strict=True):
            torch.testing.assert_close(strided, expected, rtol=1e-5, atol=1e-6)
        scored, *_ = linear_logprob(q["hidden"], q["weight"], q["targets"], backend=backend)
        torch.testing.assert_close(scored, plain[1], rtol=1e-5, atol=1e-6)


MATMULS = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def precisions(older: bool = False) -> list[Any]:
    """What the caller allows, by torch's newer API and by its older one."""
    values = [*(place.fp32_precision for place in MATMULS), MATMULS[0].allow_fp16_accumulation]
    return [*values, MATMULS[0].allow_tf32, torch.get_float32_matmul_precision()] if older else values


@pytest.fixture
def restored() -> Iterator[None]:
    *before, fp16_sums = precisions()
    MATMULS[0].allow_fp16_accumulation = True
    yield
    MATMULS[0].allow_fp16_accumulation = fp16_sums
    with suppress(RuntimeError):  # it raises after a change by the newer API, and changed nothing then
        torch.set_float32_matmul_precision("highest")
    for place, precision in zip(MATMULS, before, strict=True):
        place.fp32_precision = precision


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("allowed", ["highest", "high", "medium", "by the newer API"])
def test_products_are_fp32s_whatever_the_caller_allows_and_their_settings_stay(
    allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = allowed != "by the newer API"  # whose changes make the older getters raise
    if older:
        torch.set_float32_matmul_precision(allowed)
    else:
        MATMULS[0].fp32_precision, MATMULS[1].fp32_precision = "tf32", "bf16"
    before, seen = precisions(older), list[Any]()
    spy(monkeypatch, torch, "mm", lambda *_, **__: seen.append(precisions(older)))
    run(problem(), backend="torch")
    ieee = ["ieee", "ieee", False] + [False, "highest"] * older
    assert seen and all(x == ieee for x in seen) and precisions(older) == before


@pytest.mark.usefixtures("restored")
def test_of_two_threads_that_multiply_the_last_one_out_restores_the_callers_setting() -> None:
    MATMULS[0].fp32_precision = "tf32"
    first, second = ieee_fp32(), ieee_fp32()
    for context in (first, second):
        context.__enter__()
    for context, expected in ((first, "ieee"), (second, "tf32")):
        context.__exit__(None, None, None)
        assert MATMULS[0].fp32_precision == expected


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="no CMake or C++ compiler to build with"
)
def test_the_native_backend_is_there_where_it_can_be_built() -> None:
    # or its tests would all be skipped, and nobody the wiser
    assert kernels.backend_info()["cpu"]["available"]


def test_backend_info_says_what_works_and_why_not() -> None:
    info = kernels.backend_info()
    assert set(info) == {"cpu", "triton", "torch"} and info["torch"]["available"]
    assert all(entry["available"] or entry["why_not"] for entry in info.values())


@on_both
def test_other_numbers_of_tokens_compile_nothing_again(loss: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda q: loss(q["hidden"], q["weight"], q), fullgraph=TRACED, backend=counter)
    for n in (5, 9, 23, 11):
        p = problem(n)
        assert torch.equal(step(p), loss(p["hidden"], p["weight"], p))
    assert counter.frame_count <= 2  # the first number, and all others


@pytest.mark.parametrize(
    ("n", "most", "lengths"), [(0, 4, []), (3, 4, [3]), (9, 4, [3, 3, 3]), (5, 1, [1] * 5)]
)
def test_chunks_are_few_and_even(n: int, most: int, lengths: list[int]) -> None:
    parts = head.chunks(n, most)
    assert [part.stop - part.start for part in parts] == lengths
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(n))


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed: requirements/tests.txt")
@pytest.mark.parametrize("row_kernel", ["two-pass", "single-pass", "fused-epilogue"])
@pytest.mark.parametrize("chunk_rows", [24, 1])
def test_each_row_kernel_errs_by_its_rounding_alone_however_many_chunks(
    row_kernel: Any, chunk_rows: int
) -> None:
    p = problem(24, 32, 151)
    half = rounded(p)
    _, logp, entropy, dx, dw = run(half, backend="triton", row_kernel=row_kernel, chunk_rows=chunk_rows)
    _, logp64, entropy64, *grads64 = exact(p)
    assert float((logp - logp64).abs().max()) <= 5e-6 and float((entropy - entropy64).abs().max()) <= 1e-5
    for ours, expected in zip((dx, dw), grads64, strict=True):
        # bf16 rounds dz, and again the gradients themselves; with so few terms little of it averages out.
        # bench.kernels.accuracy measures full-size problems.
        assert error(ours, expected) <= 2.8e-3


@pytest.mark.parametrize(
    ("backend", "dtype", "settings", "chosen"),
    [
        ("triton", torch.bfloat16, {}, "single-pass"),
        ("triton", torch.bfloat16, {"objective": GSPO()}, "single-pass"),
        ("triton", torch.bfloat16, {"entropy_bonus": 0.1}, "two-pass"),
        ("triton", torch.bfloat16, {"softcap": 30.0}, "two-pass"),
        ("triton", torch.bfloat16, {"exact": True}, "two-pass"),
        ("triton", torch.bfloat16, {"row_kernel": "two-pass"}, "two-pass"),
        ("triton", torch.float32, {}, "two-pass"),
        ("torch", torch.bfloat16, {}, "two-pass"),
    ],
)
def test_one_pass_is_the_default_where_it_applies(
    backend: str, dtype: torch.dtype, settings: dict[str, Any], chosen: str
) -> None:
    if backend == "triton":
        pytest.importorskip("triton")
    hidden, weight = torch.zeros(2, 16, dtype=dtype), torch.zeros(20, 16, dtype=dtype)
    prepared = head.LMHead.prepare(hidden, weight, torch.float32, Settings(backend=backend, **settings), 0)
    assert prepared.settings.row_kernel == chosen


@pytest.mark.parametrize("row_kernel", ["two-pass", "fused-epilogue"])
def test_the_callers_default_dtype_changes_no_bit(backend: str, row_kernel: Any) -> None:
    if backend != "triton" and row_kernel != "two-pass":
        pytest.skip("a row kernel of the Triton backend")
    p, found = problem(), []
    half = rounded(p)
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            options: dict[str, Any] = {"row_kernel": row_kernel, "temperature": 0.7, "objective": SAPO()}
            trained = run(half, backend=backend, **options)
            scored = linear_logprob(half["hidden"], half["weight"], half["targets"], backend=backend)
            found.append([*trained, *scored, kernels.token_weights([5, 9], [0, 1], "sum")])
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*found, strict=True))


def test_kernels_are_launched_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded: list[Tensor] = []

    @contextmanager
    def guard(x: Tensor) -> Iterator[None]:
        guarded.append(x)
        yield
        guarded.pop()

    monkeypatch.setattr(torch.cuda, "device_of", guard)
    launches = list[int]()
    for name in ("prepare", "logits", "row_stats", "row_grads", "d_hidden", "add_d_weight"):
        spy(monkeypatch, torch_backend, name, lambda *_, **__: launches.append(len(guarded)))
    p = problem()
    run(p, backend="torch")
    linear_logprob(p["hidden"], p["weight"], p["targets"], backend="torch")
    assert len(launches) >= 9 and set(launches) == {1} and not guarded


def with_masked_rows() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A problem whose rows 5 to 11 have weight 0, and the same with NaN and impossible ids in them."""
    p = problem()
    p["token_weights"][5:12] = 0
    p |= {"logprobs_ref": p["logprobs_gen"] - 0.1, "temperature": torch.linspace(0.5, 1.5, 23)}
    p["sequences"] = torch.arange(23) // 3  # one is masked as a whole
    junk = {k: x.clone() for k, x in p.items()}
    for name in ("hidden", "logprobs_gen", "advantages", "logprobs_ref", "temperature"):
        junk[name][5:12] = math.nan
    junk["targets"][5:12] = -100
    return p, junk


@pytest.mark.parametrize("objective", [CISPO(), GSPO()], ids=["CISPO", "GSPO"])
@pytest.mark.parametrize("captured", [False, True], ids=["asked", "captured"])
def test_masked_rows_that_are_not_dropped_change_nothing(
    backend: str, objective: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, junk = with_masked_rows()
    options: dict[str, Any] = {"backend": backend, "objective": objective, "kl": KL(0.1), "chunk_rows": 9}
    dropped, expected = run(p, **options), policy_loss(**p, **options).stats  # type: ignore[arg-type]  # tensors
    monkeypatch.setattr(op_module, "weighted_rows", lambda _: pytest.fail("the host waited for the device"))
    if captured:  # as in the capture of a CUDA graph
        monkeypatch.setattr(op_module, "capturing", lambda _: True)
    else:
        options["drop_masked"] = False
    for ours, other in zip(run(junk, **options), dropped, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6)
    stats = policy_loss(**junk, **options).stats  # type: ignore[arg-type]  # every argument is a tensor
    torch.testing.assert_close(stats, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton is not installed: requirements/tests.txt")
@pytest.mark.parametrize("row_kernel", ["two-pass", "fused-epilogue"])
def test_one_chunk_writes_the_weights_gradient_at_once_in_its_type(
    row_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernels.triton import backend as triton_backend

    seen = []

    def note(dz: Tensor, h: Tensor, out: Tensor, first: bool = False) -> None:
        seen.append((out.dtype, first))
        if first:
            out.fill_(math.nan)  # what is there is not read

    spy(monkeypatch, triton_backend, "add_d_weight", note)
    monkeypatch.setattr(head, "WHOLE_D_WEIGHT", 1)
    p = problem()
    half = rounded(p)
    options: dict[str, Any] = {"backend": "triton", "row_kernel": row_kernel}
    whole, apart = run(half, **options)[4], run(half, **options, chunk_rows=8)[4]
    assert seen == [(torch.bfloat16, True)] + [(torch.float32, i == 0) for i in range(3)]
    assert whole.dtype == apart.dtype == torch.bfloat16 and error(whole, apart.double()) < 4e-3
    run(p, **options | {"row_kernel": "two-pass"})  # FP32 keeps its digits
    run(half, backend="triton", exact=True)
    monkeypatch.setattr(head, "WHOLE_D_WEIGHT", 1 << 24)
    run(half, **options)
    assert [dtype for dtype, _ in seen[4:]] == [torch.float32] * 3


def test_the_backward_scales_each_gradient_in_one_operation() -> None:
    for factor, retained, expected in (
        (1, False, {}),
        (3, False, {"aten.mul_.Tensor": 2}),
        (3, True, {"aten.mul.out": 2}),
    ):
        loss = policy_loss(**leaves(rounded(problem())), backend="torch").loss
        with Watch() as watch:
            loss.backward(torch.tensor(float(factor)), retain_graph=retained)
        called = [name for name, _ in watch.ops if "mul" in name or "_to_copy" in name]
        assert {name: called.count(name) for name in called} == expected
