"""Does a completion repeat itself?"""

import numpy as np
from numpy.typing import NDArray

LENGTH = 4  # tokens of the sequences that are compared: two pairs
HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd: multiples are spread evenly
AT_LEAST = 64  # tokens of a completion that is judged
DISTINCT = 0.3  # share of its sequences below which it is repetitive; running text has above .8


def is_repetitive(token_ids: NDArray[np.int32]) -> bool:
    """Whether few of the completion's sequences of LENGTH tokens, (T,), are distinct."""
    if len(token_ids) < AT_LEAST:
        return False
    return count_distinct(token_ids) < DISTINCT * (len(token_ids) - LENGTH + 1)


def count_distinct(token_ids: NDArray[np.int32]) -> int:
    """How many of the sequences of LENGTH tokens are distinct: of their 64-bit hashes, which sort 15 times as
    fast as the sequences. That two of 12,000 sequences have the same hash has a probability of 1e-11."""
    pairs = token_ids[:-1].astype(np.uint64) << np.uint64(32) | token_ids[1:].astype(np.uint64)
    return len(np.unique(pairs[:-2] * HASH + pairs[2:]))
