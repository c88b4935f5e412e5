"""Decoding without the host: tokens, positions, temperatures and random numbers stay on the device.

A step has one of a few shapes, so that a CUDA graph of each replays its hundreds of launches as one: the
slots in use are rounded up to a power of two, and so is the KV length. Slots that are not in use compute what
nobody reads; their KV is overwritten when they are. The host learns the tokens (it ends completions) by one
copy a step, and writes the state only after slots have changed.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.engines.torch.sampling import sample, uniforms
from trainer.engines.torch.slots import Slots

MIN_LENGTH = 64  # of the KV that a step reads
Shape = tuple[int, int, bool, bool]  # slots, KV length, whether a temperature is not 1, whether one is 0


class Decoder:
    """One token of each of the first slots per `step`.

    `body(ids, positions, length)` is the model with its KV cache, `head` makes FP32 logits of hidden states;
    neither may wait for the device if `graphs` are used."""

    def __init__(
        self,
        capacity: int,
        device: torch.device,
        graphs: bool,
        body: Callable[[Tensor, Tensor, int], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> None:
        self._body, self._head, self.graphs = body, head, graphs
        # Rows: newest token, its position, key and count of the random numbers, bits of the FP64 temperature.
        self._state = torch.zeros(5, capacity, dtype=torch.long, device=device)
        self._expected = np.zeros((5, 0), np.int64)  # the state that the device has of the slots in use
        self._result = torch.zeros(2, capacity, dtype=torch.float64, device=device)  # tokens, log-probs
        self._cache_length = 0  # tokens
        self._captured: dict[Shape, torch.cuda.CUDAGraph | None] = {}  # None: its first step warmed it up

    def step(self, slots: Slots, active: int, cache: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """A token of each of the first `active` slots, and its log-prob."""
        if cache.shape[4] != self._cache_length:  # it has grown, and graphs hold its address
            self._cache_length = cache.shape[4]
            self._captured.clear()
        temperature = slots.column("temperature")[:active].astype(np.float64)
        ids, positions = slots.newest(active)
        key, count = slots.column("key")[:active].view(np.int64), slots.column("count")[:active]
        state = np.stack([ids.astype(np.int64), positions, key, count, temperature.view(np.int64)])
        if not np.array_equal(state, self._expected):
            whole = np.zeros(self._state.shape, np.int64)
            whole[:, :active] = state
            self._state.copy_(torch.from_numpy(whole))
        rows = min(_power_of_two(active), self._state.shape[1])
        length = min(_power_of_two(max(MIN_LENGTH, int(positions.max()) + 1)), cache.shape[4])
        self._run((rows, length, bool((temperature != 1).any()), bool((temperature == 0).any())))
        tokens, logprobs = self._result[:, :active].cpu().numpy()  # the one wait of a step
        newest: NDArray[np.int64] = tokens.astype(np.int64)
        self._expected = np.stack([newest, positions + 1, key, count + 1, state[4]])
        return newest, logprobs

    def _run(self, shape: Shape) -> None:
        """Compute a step: at the first one of a shape each operation is launched, later its graph."""
        if not self.graphs or shape not in self._captured:
            self._captured[shape] = None
            self._compute(*shape)
            return
        graph = self._captured[shape]
        if graph is None:
            pool = next((g.pool() for g in self._captured.values() if g), None)  # one at a time is replayed
            graph = self._captured[shape] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool):  # nothing is computed while it is captured
                self._compute(*shape)
        graph.replay()

    def _compute(self, rows: int, length: int, tempered: bool, greedy: bool) -> None:
        """Write the tokens and log-probs of a step, and the state of the next one."""
        ids, positions, keys, counts, bits = self._state[:, :rows]
        logits = self._head(self._body(ids, positions, length))
        temperature = bits.view(torch.float64).float()
        tokens, logprobs = sample(logits, temperature, uniforms(keys, counts), tempered, greedy)
        for row, values in zip(self._result, (tokens, logprobs), strict=True):
            row[:rows] = values
        ids.copy_(tokens)
        positions += 1
        counts += 1


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
