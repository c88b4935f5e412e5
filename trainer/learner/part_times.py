"""Times of two parts of forward and backward: the loss of the LM head, and attention.

A GPU does its work later than Python asks for it, so there the times are those of CUDA events, which are read
once the step has waited for the GPU anyway. On a CPU they are wall time.

    forward     begin ─ part ─ end
    backward    gradient of the part's output (begin) ─ part ─ gradient of its input (end)
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOSS_HEAD, ATTENTION = "loss_head", "attention"


class PartTimes:
    """The seconds of each part since the last `read`; nothing is measured outside of `measuring`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._on = False
        self._begun: dict[str, float | torch.cuda.Event] = {}  # by part
        self._spans: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure for the block."""
        self._on = True
        try:
            yield
        finally:
            self._on = False
            self._begun.clear()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block as a part."""
        self._begin(name)
        try:
            yield
        finally:
            self._end(name)

    def backward_of(self, name: str, inputs: Tensor, output: Tensor) -> None:
        """Measure a part in the backward, too: from the gradient of `output` to that of `inputs`."""
        if self._on and inputs.requires_grad and output.requires_grad:
            output.register_hook(lambda _: self._begin(name))
            inputs.register_hook(lambda _: self._end(name))

    def read(self) -> dict[str, float]:
        """Seconds by part. On a GPU everything measured must be done."""
        seconds: dict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            if isinstance(start, float) and isinstance(end, float):
                seconds[name] += end - start
            elif isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                seconds[name] += start.elapsed_time(end) / 1000
        self._spans.clear()
        return dict(seconds)

    def _begin(self, name: str) -> None:
        if self._on:
            self._begun[name] = self._now()

    def _end(self, name: str) -> None:
        if name in self._begun:
            self._spans.append((name, self._begun.pop(name), self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
