"""Linear layers whose weights also lie in oneDNN's own layout: faster for small batches on a CPU.

Query, key and value projections of one attention become one product: the query's layer makes all three,
and the others take theirs when they are called with the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

PACK_FROM = 512  # output features; below, packing does not pay (measured at 32 rows under AVX2)
ONE_INPUT = ("q_proj", "k_proj", "v_proj")


class PackedLinear(nn.Linear):
    """As nn.Linear in float32; call `pack` after the weight has changed."""

    packed: Tensor
    packed_bias: Tensor | None
    followers: Sequence[TakenLinear]

    def pack(self, rows: int) -> None:
        """Lay the weight out anew, best for inputs of `rows` rows."""
        layers = (self, *self.followers)
        weights: list[Tensor] = [x.weight.detach() for x in layers]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), rows)
        biases: list[Tensor] = [x.bias.detach() for x in layers if x.bias is not None]
        self.packed_bias = torch.cat(biases) if biases else None

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.packed_bias, "none", [], "")
        if not self.followers:
            return out
        own, *theirs = out.split([x.out_features for x in (self, *self.followers)], -1)
        for follower, part in zip(self.followers, theirs, strict=True):
            follower.ready = input, part
        return own


class TakenLinear(nn.Linear):
    """As nn.Linear; takes what its leader has made of the same input."""

    ready: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        made, self.ready = self.ready, None
        return made[1] if made is not None and made[0] is input else super().forward(input)


def _packable(linear: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether oneDNN can take it."""
    return (
        type(linear) is nn.Linear
        and torch.backends.mkldnn.is_available()
        and linear.weight.device.type == "cpu"
        and linear.weight.dtype == torch.float32
    )


def pack_linears(model: nn.Module, rows: int) -> list[PackedLinear]:
    """Turn the model's linear layers into packed ones in place; parameters and names stay. Again: anew."""
    for parent in model.modules():
        family = [x for name in ONE_INPUT if _packable(x := getattr(parent, name, None))]
        if len(family) == len(ONE_INPUT) and len({x.bias is None for x in family}) == 1:
            _lead(*family)
    layers = []
    for module in model.modules():
        if _packable(module) and module.out_features >= PACK_FROM:
            _lead(module)
        if isinstance(module, PackedLinear):
            module.pack(rows)
            layers.append(module)
    return layers


def _lead(leader: nn.Linear, *followers: nn.Linear) -> None:
    leader.__class__ = PackedLinear
    for follower in followers:
        follower.__class__ = TakenLinear
    leader.followers = followers  # type: ignore[assignment]  # a PackedLinear by now
