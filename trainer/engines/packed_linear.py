"""Linear layers whose weights also lie in oneDNN's own layout: faster for small batches on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACK_FROM = 512  # output features; below, packing does not pay (measured at 32 rows under AVX2)


class PackedLinear(nn.Linear):
    """As nn.Linear in float32; call `pack` after the weight has changed."""

    packed: Tensor

    def pack(self, rows: int) -> None:
        """Lay the weight out anew, best for inputs of `rows` rows."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)."""
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


def packable(linear: nn.Module) -> bool:
    """Whether oneDNN can take it, and it is large enough to gain."""
    return (
        type(linear) is nn.Linear
        and torch.backends.mkldnn.is_available()
        and linear.weight.device.type == "cpu"
        and linear.weight.dtype == torch.float32
        and linear.out_features >= PACK_FROM
    )


def pack_linears(model: nn.Module, rows: int) -> list[PackedLinear]:
    """Turn the model's linear layers into packed ones in place; parameters and names stay."""
    layers = []
    for module in model.modules():
        if packable(module):
            module.__class__ = PackedLinear
        if isinstance(module, PackedLinear):
            module.pack(rows)
            layers.append(module)
    return layers
