"""Linear layers with a second copy of their weights in oneDNN's layout: faster for small batches on a CPU,
and the bits of a row do not depend on the number of rows, as they do in torch's own product (of MKL).

The query, key and value projections of an attention are fused into one product: the query's layer computes
all three, and the other two return their share when they are called with the same input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

QKV = ("q_proj", "k_proj", "v_proj")


class PackedLinear(nn.Linear):
    """nn.Linear fused with others of the same input; call `pack` after their weights changed."""

    packed: Tensor
    packed_bias: Tensor | None
    fused: Sequence[FusedLinear]

    def pack(self, rows: int) -> None:
        """Copy the weights into the layout that is best for inputs of `rows` rows."""
        layers = (self, *self.fused)
        weights: list[Tensor] = [x.weight.detach() for x in layers]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), rows)
        biases: list[Tensor] = [x.bias.detach() for x in layers if x.bias is not None]
        self.packed_bias = torch.cat(biases) if biases else None

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.packed_bias, "none", [], "")
        if not self.fused:
            return out
        first, *rest = out.split([x.out_features for x in (self, *self.fused)], -1)
        for layer, output in zip(self.fused, rest, strict=True):
            layer.precomputed = input, output
        return first


class FusedLinear(nn.Linear):
    """nn.Linear whose output a PackedLinear has computed with its own, if that had the same input."""

    precomputed: tuple[Tensor, Tensor] | None = None  # input, output

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        pair, self.precomputed = self.precomputed, None
        return pair[1] if pair is not None and pair[0] is input else super().forward(input)


def _packable(linear: nn.Module | None) -> TypeGuard[nn.Linear]:
    """True if oneDNN can multiply by it: in bfloat16 only where the CPU has instructions for it."""
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu":
        return False
    bf16 = linear.weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.backends.mkldnn.is_available() and (linear.weight.dtype == torch.float32 or bool(bf16))


def pack_linears(model: nn.Module, rows: int) -> None:
    """Make the model's linear layers packed ones, in place; parameters and names stay. After a change of the
    weights, call it again."""
    for parent in model.modules():
        qkv = [x for name in QKV if _packable(x := getattr(parent, name, None))]
        if len(qkv) == len(QKV) and len({x.bias is None for x in qkv}) == 1:
            _fuse(*qkv)
    for module in model.modules():
        if _packable(module):
            _fuse(module)
        if isinstance(module, PackedLinear):
            module.pack(rows)


def _fuse(first: nn.Linear, *others: nn.Linear) -> None:
    """Let `first` compute the outputs of all of them."""
    first.__class__ = PackedLinear
    for linear in others:
        linear.__class__ = FusedLinear
    first.fused = others  # type: ignore[assignment]  # `first` is a PackedLinear now
