"""The terms of a chunk in one launch: from the rows' statistics to weighted loss and the gradient's factors.

The formulas are those of `kernels.rows` and the objectives, which compute the same on all other
backends, and for any other objective. `tests/kernels/test_triton_terms.py` holds the two to each other.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# mypy: disable-error-code="import-untyped,import-not-found"

import triton
import triton.language as tl
from torch import Tensor

from ..objectives import CISPO, OBJECTIVES, SAPO, IcePop
from ..rows import Gradient
from ..settings import Settings
from ..token_objectives import REINFORCE, Clip
from ..tokens import Tokens
from .config import launch
from .elementwise import expm1, log1p, precise_exp, precise_log
from .rows import dense

BLOCK = 256
"""Rows of a program, which sums their terms."""
TERMS = {type(entry.make()): entry.triton for entry in OBJECTIVES.values() if entry.triton}
ESTIMATORS = {"k1": 1, "k2": 2, "k3": 3, "unbiased": 4}


def has_terms(settings: Settings) -> bool:
    """True if this module has the objective's terms."""
    return type(settings.objective) in TERMS


def terms(stats: Tensor, t: Tokens, settings: Settings, values: list[Tensor]) -> tuple[Gradient, Tensor]:
    """The logits' gradient of C rows, and (blocks,) sums of weight · term with its penalties.

    stats (4, C) are over the whole vocabulary. `values` are filled, (C,) each: log-prob, entropy, ratio,
    truncated, KL estimate.
    """
    rows, bonus, kl = stats.shape[1], settings.entropy_bonus != 0.0, settings.kl
    per_token = dense(t.logprobs_gen, t.advantages, t.weights, t.inverse_temperature)
    reference = per_token[0] if t.logprobs_ref is None else t.logprobs_ref.contiguous()
    factors, sums = stats.new_empty(4 if bonus else 2, rows), stats.new_empty(triton.cdiv(rows, BLOCK))
    tensors = stats, *per_token, reference, *values, factors, sums
    coefficients = settings.entropy_bonus, 0.0 if kl is None else kl.coefficient
    numbers = *_parameters(settings.objective), *coefficients
    constants = {"OBJECTIVE": TERMS[type(settings.objective)], "BONUS": bonus, "BLOCK": BLOCK, "num_warps": 4}
    constants["KL"] = 0 if kl is None else ESTIMATORS[kl.estimator]
    launch(_terms, (len(sums),), *tensors, rows, *numbers, **constants)
    b, k = (factors[2], factors[3]) if bonus else (None, None)
    return Gradient(stats[0], factors[0], b, k, factors[1]), sums


def _parameters(objective: object) -> tuple[float, float, float]:
    """The objective's numbers, in the order in which the kernel names them."""
    match objective:
        case CISPO(max_ratio):
            return 0.0, max_ratio, 0.0
        case Clip(low, high, dual):
            return 1 - low, 1 + high, dual
        case IcePop(low, high) | SAPO(low, high):
            return low, high, 0.0
        case REINFORCE():
            return 0.0, 0.0, 0.0
        case _:
            raise TypeError(f"{objective} has a branch below, but its numbers are missing here")


POINTERS = [
    "stats", "logprobs_gen", "advantages", "weights", "inverse_temperature", "logprobs_ref", "logp_out",
    "entropy_out", "ratio_out", "truncated_out", "kl_out", "factors", "sums",
]  # fmt: skip


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=POINTERS)  # one compilation for all
def _terms(
    stats, logprobs_gen, advantages, weights, inverse_temperature, logprobs_ref, logp_out, entropy_out,
    ratio_out, truncated_out, kl_out, factors, sums, rows, low, high, dual, bonus, kl_coefficient,
    OBJECTIVE: tl.constexpr, BONUS: tl.constexpr, KL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    anchor = tl.load(stats + row, mask=inside, other=0.0)
    others = tl.load(stats + rows + row, mask=inside, other=0.0)
    target = tl.load(stats + 2 * rows + row, mask=inside, other=0.0)
    dot = tl.load(stats + 3 * rows + row, mask=inside, other=0.0)
    advantage = tl.load(advantages + row, mask=inside, other=0.0)
    weight = tl.load(weights + row, mask=inside, other=0.0)
    scale = tl.load(inverse_temperature + row, mask=inside, other=1.0)

    logp, entropy, total = softmax(target - anchor, others, dot)
    log_ratio = logp - tl.load(logprobs_gen + row, mask=inside, other=0.0)
    ratio = precise_exp(tl.where(log_ratio > 80.0, 80.0, log_ratio))
    loss, derivative, truncated = objective(logp, ratio, advantage, low, high, dual, OBJECTIVE)
    loss -= bonus * entropy
    if KL:
        log_ratio = logp - tl.load(logprobs_ref + row, mask=inside, other=0.0)
        if KL == 1:
            estimate, slope = log_ratio, 1.0
        elif KL == 2:
            estimate, slope = 0.5 * log_ratio * log_ratio, log_ratio
        else:
            exp = expm1(0.0 - log_ratio)
            estimate, slope = exp + log_ratio, 0.0 - exp
            if KL == 4:
                estimate, slope = ratio * estimate, ratio * log_ratio
        loss += kl_coefficient * estimate
        derivative += kl_coefficient * slope
        tl.store(kl_out + row, estimate, mask=inside)
    tl.store(logp_out + row, logp, mask=inside)
    tl.store(entropy_out + row, entropy, mask=inside)
    tl.store(ratio_out + row, ratio, mask=inside)
    tl.store(truncated_out + row, truncated.to(tl.float32), mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, weight * loss, 0.0), 0))

    # kernels.rows.gradient
    c, per_total = weight * derivative, scale / total
    dz_y = c * others * per_total
    if BONUS:
        e = 0.0 - bonus * weight
        dz_y -= e * precise_exp(logp) * (logp + entropy) * scale
        tl.store(factors + 2 * rows + row, (0.0 - e) * per_total, mask=inside)
        tl.store(factors + 3 * rows + row, entropy - precise_log(total), mask=inside)
    tl.store(factors + row, (0.0 - c) * per_total, mask=inside)
    tl.store(factors + rows + row, dz_y, mask=inside)


@triton.jit
def softmax(d, others, dot):
    """`kernels.rows.softmax`: log-prob, entropy and total from d = target − anchor and the sums."""
    exp_y = precise_exp(d)
    total = others + exp_y
    log_total = tl.where(d == 0.0, log1p(others), precise_log(total))
    relative = others / tl.where(exp_y < 1e-30, 1e-30, exp_y)
    logp = tl.where(d > -20.0, 0.0 - log1p(relative), d - log_total)
    entropy = log_total - (dot + exp_y * d) / total
    return logp, entropy, total


@triton.jit
def objective(logp, ratio, advantage, low, high, dual, OBJECTIVE: tl.constexpr):
    """`kernels.token_objectives`: loss, its derivative, and where a bound was active.

    Comparisons choose the bounds, so that NaN stays NaN.
    """
    truncated = ratio < 0.0  # never
    if OBJECTIVE == "plain":  # REINFORCE
        derivative = 0.0 - advantage
        loss = derivative * logp
    elif OBJECTIVE == "truncated":  # CISPO, TIS
        truncated = ratio > high
        derivative = 0.0 - tl.where(truncated, high, ratio) * advantage
        loss = derivative * logp
    elif OBJECTIVE == "clip":
        free = ratio * advantage
        bounded = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio)) * advantage
        surrogate = tl.where(bounded < free, bounded, free)
        worst = dual * advantage
        surrogate = tl.where((advantage < 0.0) & (surrogate < worst), worst, surrogate)
        truncated = surrogate != free
        derivative = tl.where(truncated, 0.0, 0.0 - free)
        loss = 0.0 - surrogate
    elif OBJECTIVE == "mask":  # IcePop
        truncated = (ratio < low) | (ratio > high)
        derivative = tl.where(truncated, 0.0, 0.0 - ratio * advantage)
        loss = derivative * logp
    else:
        tl.static_assert(OBJECTIVE == "gate", "the table names a branch that is not here")  # SAPO
        tau = tl.where(advantage > 0.0, low, high)
        gate = 1.0 / (1.0 + precise_exp(tau * (1.0 - ratio)))
        rest = 1.0 / (1.0 + precise_exp(tau * (ratio - 1.0)))
        derivative = -4.0 * gate * rest * ratio * advantage
        loss = -4.0 / tau * gate * advantage
    return loss, derivative, truncated
