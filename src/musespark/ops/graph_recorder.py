"""Recording launches as a CUDA graph, which repeats them on the same memory with one launch."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

SIZES = (1, 2, 4, 8, *range(16, 257, 16))
"""Rows that a step is padded to; a step of more runs as it is."""

Result = TypeVar("Result")


def padded_size(num_rows: int) -> int:
    """The smallest of `SIZES` that holds so many rows, which must not be more than the last."""
    return SIZES[bisect_left(SIZES, num_rows)]


class Recorder(Protocol):
    """Records what a function launches; a stand-in may simply call it again."""

    def record(self, forward: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """(what repeats the launches of `forward`, its result, which each repetition fills)."""
        ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory, since they never run at once.

    A graph reads tensors of `forward` by address, so what repeats it keeps `forward` too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, forward: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Runs `forward` twice; it must not ask the device for anything."""
        # The first run compiles kernels and sets libraries up, which a graph cannot record.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            result = forward()
        return _Replay(graph, forward), result


@dataclass(frozen=True, slots=True)
class _Replay:
    """Repeats a graph."""

    graph: torch.cuda.CUDAGraph
    forward: Callable[[], Any]
    """What was recorded, with all that it refers to."""

    def __call__(self) -> None:
        self.graph.replay()
