"""Does a completion repeat itself?"""

import numpy as np
from numpy.typing import NDArray

LENGTH = 4  # tokens of the sequences that are compared
AT_LEAST = 64  # tokens of a completion that is judged
DISTINCT = 0.3  # share of its sequences below which it is repetitive; running text has above .8


def is_repetitive(token_ids: NDArray[np.int32]) -> bool:
    """Whether few of the completion's sequences of LENGTH tokens, (T,), are distinct."""
    if len(token_ids) < AT_LEAST:
        return False
    sequences = np.lib.stride_tricks.sliding_window_view(token_ids, LENGTH)
    distinct = len(np.unique(np.ascontiguousarray(sequences).view(f"V{sequences.itemsize * LENGTH}")))
    return distinct < DISTINCT * len(sequences)
