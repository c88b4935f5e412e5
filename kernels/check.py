"""Checks of the ops' inputs. Every ValueError says what was given and what was expected."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .term import Term

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)
_OPTIONAL = ("logprobs_ref", "sequences")


class NonFiniteError(ValueError):
    """A tensor given to an op, or the log-probs computed from it, hold NaN or infinity."""


def check_tensors(tensors: Mapping[str, Tensor | None]) -> None:
    """ValueError unless all are tensors on the device of the first, or None where that is an option."""
    first = next(iter(tensors))
    device = getattr(tensors[first], "device", None)
    for name, x in tensors.items():
        if x is None and name in _OPTIONAL:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: expected a tensor, given {type(x).__name__}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, {first} on {device}; put both on one device")


def check_floating(**dtypes: torch.dtype) -> None:
    """ValueError unless all are floating types."""
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            raise ValueError(f"{name}: expected a floating type, given {dtype}")


def check_shapes(
    hidden: Tensor, weight: Tensor, logits_dtype: torch.dtype, **per_token: Tensor | None
) -> None:
    """ValueError on wrong shapes, types or devices; `per_token` holds all inputs of shape (N,)."""
    check_tensors({"hidden": hidden, "weight": weight, **per_token})
    check_floating(hidden=hidden.dtype, weight=weight.dtype)
    shapes = tuple(hidden.shape), tuple(weight.shape)
    if hidden.dim() != 2 or weight.dim() != 2 or shapes[0][1] != shapes[1][1]:
        raise ValueError(
            f"expected hidden (N, H), leading dimensions flattened, and weight (V, H), "
            f"given {shapes[0]} and {shapes[1]}"
        )
    if not weight.numel():
        raise ValueError(f"weight (V, H) has shape {shapes[1]}; expected V and H of at least 1")
    if logits_dtype not in _ROUNDED:
        raise ValueError(f"logits_dtype: expected float32, bfloat16 or float16, given {logits_dtype}")
    n = hidden.shape[0]
    for name, x in per_token.items():
        if x is not None and x.shape != (n,):
            raise ValueError(f"{name}: expected shape ({n},), as hidden has {n} rows, given {tuple(x.shape)}")
        if x is not None and name in ("targets", "sequences") and x.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: expected int64 or int32, given {x.dtype}")


def check_values(
    hidden: Tensor, vocabulary: int | Tensor, targets: Tensor, inverse_temperature: Tensor,
    **per_token: Tensor | None,
) -> None:  # fmt: skip
    """ValueError on ids outside the vocabulary, NonFiniteError on NaN and infinity.

    Only on the CPU: on a GPU the host would have to wait for the result.
    """
    if hidden.device.type != "cpu" or not len(targets):
        return
    low, high = (int(x) for x in targets.aminmax())
    if low < 0 or high >= int(vocabulary):
        raise ValueError(f"targets hold ids from {low} to {high}; expected 0 to {int(vocabulary) - 1}")
    if not bool((inverse_temperature.isfinite() & (inverse_temperature > 0)).all()):
        raise ValueError("temperature holds values that are not finite and above 0")
    for name, x in {"hidden": hidden, **per_token}.items():
        if x is not None and not bool(x.isfinite().all()):
            raise NonFiniteError(f"{name} holds NaN or infinity")


def check_log_probs(logp: Tensor, entropy: Tensor) -> None:
    """NonFiniteError if they are not finite; on the CPU only. This replaces a pass over the whole weight."""
    if logp.device.type == "cpu" and not bool((logp + entropy).isfinite().all()):
        raise NonFiniteError("weight holds NaN or infinity, or the logits exceed their type")


def check_term(term: Term, n: int) -> Term:
    """The objective's result; ValueError unless it is a `Term` of (n,) tensors. Others would be broadcast."""
    shapes = [tuple(getattr(getattr(term, x, None), "shape", ("no tensor",))) for x in Term.__slots__]
    if any(shape != (n,) for shape in shapes):
        raise ValueError(
            f"objective: expected a Term of {', '.join(Term.__slots__)}, each ({n},) as its log-probs, "
            + (f"given shapes {shapes}" if isinstance(term, Term) else f"given {type(term).__name__}")
        )
    return term


def refuse_text(**options: object) -> None:
    """ValueError if one is text, such as a setting that was read from a file."""
    if wrong := [f"{name} is {x!r}" for name, x in options.items() if isinstance(x, str)]:
        raise ValueError(f"{wrong[0]}; expected a number")


def inverse(temperature: float | Tensor, hidden: Tensor) -> Tensor:
    """(N,) 1/temperature, in the type in which logits are accumulated."""
    n = hidden.shape[0]
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(temperature, Tensor):
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}; expected a finite number above 0")
        return torch.full((n,), 1.0 / temperature, dtype=dtype, device=hidden.device)
    if temperature.shape not in ((), (n,)):
        raise ValueError(f"temperature: expected a number or shape ({n},), given {tuple(temperature.shape)}")
    return temperature.detach().to(hidden.device, dtype).reciprocal().expand(n)
