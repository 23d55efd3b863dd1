"""A uniform number for every position of every output, computed and not drawn.

It depends on the request's seed, the output's index and the position alone. So a request that is
preempted, or whose tokens are guessed ahead and checked, meets the same numbers again; nothing is
stored; and no request disturbs another. The generator is SplitMix64, whose state is a counter.
"""

from hashlib import blake2b

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)
# What separates the numbers that one position needs beside the one that decides its token.
DRAFT = np.uint64(0xA3EC647659359ACD)
"""To draw a guessed token."""
ACCEPT = np.uint64(0x5851F42D4C957F2D)
"""To accept a guessed token."""
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def random_key(seed: int, index: int) -> int:
    """Where the sequence of one output begins, 64 bits."""
    digest = blake2b(f"{seed},{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Float64 from 0 to below 1, for `keys` uint64 at `positions`, of shapes that broadcast.

    Keys combined with `DRAFT` or `ACCEPT` by exclusive or give further, independent numbers.
    """
    state = keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    state = (state ^ (state >> np.uint64(30))) * _FACTORS[0]
    state = (state ^ (state >> np.uint64(27))) * _FACTORS[1]
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
