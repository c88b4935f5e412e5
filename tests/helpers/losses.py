"""Problems for the fused loss, its results and gradients, the same in float64, and how far they lie apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import PolicyLossOutput, linear_logprob, policy_loss
from kernels.reference import reference_loss
from kernels.rows import softmax

TRACED = torch.__version__ >= "2.13"  # torch.compile takes the op into its graph


class Watch(TorchDispatchMode):
    """What runs inside: each op's name and the type of its first tensor; the largest tensor given back."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, torch.dtype | None]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *(x.numel() for x in results)])
        self.ops.append((str(func), getattr(args[0], "dtype", None) if args else None))
        return out


def problem(
    n: int = 23, h: int = 13, v: int = 61, std: float = 1.0, seed: int = 0, noise: float = 0.5,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Tensor]:  # fmt: skip
    """Arguments of `policy_loss`: numbers of this type in FP32, ratios on both sides of 1."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    hidden, weight = rand(n, h).to(dtype).float(), (rand(v, h) * std / h**0.5).to(dtype).float()
    targets = torch.randint(v, (n,), generator=g)
    logp = torch.log_softmax((hidden @ weight.T).double(), 1)[torch.arange(n), targets].float()
    return {
        "hidden": hidden, "weight": weight, "targets": targets, "logprobs_gen": logp + noise * rand(n),
        "advantages": rand(n), "token_weights": torch.rand(n, generator=g) / max(n, 1),
    }  # fmt: skip


def rounded(p: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The arguments with hidden and weight in this type."""
    return p | {k: p[k].to(dtype) for k in ("hidden", "weight")}


def leaves(p: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments again, of which hidden and weight want gradients."""
    return {k: x.detach().clone().requires_grad_(k in ("hidden", "weight")) for k, x in p.items()}


def train(p: dict[str, Tensor], upstream: float = 1.0, **options: Any) -> tuple[PolicyLossOutput, Any, Any]:
    """The results of the loss, and upstream times its gradients in hidden and weight."""
    q = leaves(p)
    out = policy_loss(**q, **options)
    (out.loss * upstream).backward()
    return out, q["hidden"].grad, q["weight"].grad


def run(p: dict[str, Tensor], **options: Any) -> list[Any]:
    """Loss, log-probs, entropies, and the gradients in hidden and weight."""
    out, dx, dw = train(p, **options)
    return [out.loss.detach(), out.logprobs, out.entropy, dx, dw]


def loss_of(hidden: Tensor, weight: Tensor, p: dict[str, Tensor], **options: Any) -> Tensor:
    """The policy loss of other hidden states and another weight."""
    return policy_loss(**(p | {"hidden": hidden, "weight": weight}), **options).loss  # type: ignore[arg-type]


def score_of(hidden: Tensor, weight: Tensor, p: dict[str, Tensor], **options: Any) -> Tensor:
    """A number that depends on the log-prob and the entropy of each token."""
    out = linear_logprob(hidden, weight, p["targets"], **options)
    return (p["advantages"] * out.logprobs + p["token_weights"] * out.entropy).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {"policy_loss": loss_of, "linear_logprob": score_of}


def spy(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> None:
    """Each call of this function calls `note` first, with the same arguments."""
    function = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        note(*args, **options)
        return function(*args, **options)

    patch.setattr(owner, name, noted)


def upstream(n: int, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Gradients of a loss in log-prob and entropy, of both signs, none for every third token."""
    c, e = torch.randn(2, n, generator=torch.Generator().manual_seed(seed))
    counted = torch.arange(n) % 3 != 0
    return c * counted, e * counted


def scored(p: dict[str, Tensor], frozen: str = "", **options: Any) -> list[Any]:
    """Log-prob, entropy and log-sum-exp of `linear_logprob`, and its gradients for `upstream`."""
    q = leaves(p)
    if frozen:
        q[frozen].requires_grad_(False)
    out = linear_logprob(q["hidden"], q["weight"], q["targets"], **options)
    c, e = upstream(len(out.logprobs))
    (c * out.logprobs + e * out.entropy).sum().backward()
    return [out.logprobs.detach(), out.entropy.detach(), out.logsumexp, q["hidden"].grad, q["weight"].grad]


def in_float64(
    p: dict[str, Tensor], softcap: float | None = None, temperature: Any = 1.0, **_: Any
) -> list[Tensor]:
    """The same as `scored` in float64, by the full logits."""
    hidden, weight = (p[k].double().requires_grad_() for k in ("hidden", "weight"))
    scale = torch.as_tensor(1 / temperature, dtype=torch.float64).expand(len(hidden))
    u, logp, entropy = exact_softmax(hidden @ weight.T, p["targets"], scale, softcap or 0.0)
    c, e = upstream(len(hidden))
    gradients = torch.autograd.grad((c * logp + e * entropy).sum(), (hidden, weight))
    return [x.detach() for x in (logp, entropy, u.logsumexp(1), *gradients)]


def exact(
    p: dict[str, Tensor], upstream: float = 1.0, max_ratio: float = 4.0, **options: Any
) -> list[Tensor]:
    """The same in float64 by the reference and autograd; upstream multiplies the gradients."""
    q = leaves({k: x.double() if k in ("hidden", "weight") else x for k, x in p.items()})
    loss, logp, entropy = reference_loss(**q, max_ratio=max_ratio, **options)
    gradients = torch.autograd.grad(loss * upstream, (q["hidden"], q["weight"]))
    return [x.detach() for x in (loss, logp, entropy, *gradients)]


def exact_softmax(z: Tensor, y: Tensor, it: Tensor, cap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """(tempered logits, log π(y), entropy) in float64; π(y) near 1 keeps its precision."""
    x = cap * torch.tanh(z.double() / cap) if cap else z.double()
    u = x * it.double()[:, None]
    log_pi, target = torch.log_softmax(u, 1), y[:, None]
    others = (u - u.gather(1, target)).exp().scatter(1, target, 0.0).sum(1)
    return u, -torch.log1p(others), -(log_pi.exp() * log_pi).sum(1)


def check_single_pass(
    exp: Tensor, stats: Tensor, z: Tensor, y: Tensor, it: Tensor, atol: float
) -> list[Tensor]:
    """Ê and the statistics are those of the logits z; returns the logits' gradient and the exact one."""
    u, logp, entropy = exact_softmax(z, y, it)
    found = softmax(stats)
    torch.testing.assert_close(found.logp.double(), logp, rtol=1e-6, atol=atol)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=max(atol, 8e-6))
    dz = -exp.double() / found.total.double()[:, None]
    expected = -torch.softmax(u, 1)
    expected.scatter_add_(1, y[:, None], torch.ones(len(y), 1, dtype=torch.float64))
    assert float((dz - expected).norm() / expected.norm()) < 2.5e-3
    return [dz, expected]


def error(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over that of b."""
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
