"""Two independent chains of operations on one device, one beside the other.

A few tokens leave most of a GPU idle while a small operation runs. On a CUDA device the first chain
then runs on a stream of its own. The result is the same either way.
"""

from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeVar

import torch

First = TypeVar("First")
Second = TypeVar("Second")

MAX_TOKENS = 256
"""More tokens than this keep a device busy by themselves."""


class SideBySide(Protocol):
    """Runs two chains; their results are ready for whatever comes next on the current stream."""

    def __call__(
        self, first: Callable[[], First], second: Callable[[], Second]
    ) -> tuple[First, Second]: ...


def in_turn(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """One after the other."""
    return first(), second()


class TwoStreams:
    """The first chain on a side stream, the second on the current one.

    Memory needs no further care: the side stream waits for the current one before every use, and
    the current one for it afterwards, so what one of them gives back is reused only by work that
    comes after everybody's reading.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device)

    def __call__(
        self, first: Callable[[], First], second: Callable[[], Second]
    ) -> tuple[First, Second]:
        """Both results."""
        current = torch.cuda.current_stream(self._side.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            one = first()
        other = second()
        current.wait_stream(self._side)
        return one, other


@cache
def side_by_side(device: torch.device) -> SideBySide:
    """The fastest way on `device`; all that run there share one side stream."""
    return TwoStreams(device) if device.type == "cuda" else in_turn
