"""The loss's inputs per token, kept together while tokens are dropped, masked or taken in chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """The loss's inputs per token, (N,) each; floats have the type in which logits are accumulated."""

    targets: Tensor  # int64
    logprobs_gen: Tensor
    advantages: Tensor
    weights: Tensor
    inverse_temperature: Tensor
    logprobs_ref: Tensor | None
    sequences: Tensor | None

    def __getitem__(self, rows: slice | Tensor) -> Tokens:
        """The inputs of some of the tokens."""
        return self._map(lambda x: x[rows])

    def to(self, dtype: torch.dtype) -> Tokens:
        """The same with all floats in this type."""
        return self._map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def masked(self, counted: Tensor) -> Tokens:
        """The same with 0, or temperature 1, in the tokens that do not count; their sequence ids stay."""
        masked = self._map(lambda x: x.where(counted, 0))
        scale = self.inverse_temperature.where(counted, 1)
        return replace(masked, inverse_temperature=scale, sequences=self.sequences)

    def _map(self, f: Callable[[Tensor], Tensor]) -> Tokens:
        values = (getattr(self, name) for name in self.__slots__)
        mapped: list[Any] = [None if x is None else f(x) for x in values]
        return Tokens(*mapped)
