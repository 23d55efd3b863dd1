"""What one pipeline stage takes from the stage before it and hands to the next.

The float32 stream travels fully blended, with the auxiliary hidden states collected so far, in one
message. Sending does not wait: while the next stage works, this one goes on with another step. A
message's memory is kept until it has left, so a decoder must outlive the steps it has sent on.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from musespark.parallel.collectives import Sending, receive, send
from musespark.parallel.mesh import MeshAxis

# Steps that a stage may be ahead of the next one.
_MOST_UNDER_WAY = 8


class StageLink:
    """The two ends of a pipeline stage; at the pipeline's own ends there is nothing to call."""

    def __init__(self, axis: MeshAxis) -> None:
        self._axis = axis
        self._under_way: deque[Sending] = deque()

    @property
    def waits_for_device(self) -> bool:
        """Whether there are messages to track, from outside of any CUDA graph."""
        return self._axis.size > 1

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self._axis.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits."""
        return self._axis.rank == self._axis.size - 1

    def receive(self, like: Tensor, num_taps: int) -> tuple[Tensor, list[Tensor]]:
        """(stream [T, D], earlier stages' taps [T, D]) of the next step, shaped as `like`."""
        message = like.new_empty((1 + num_taps, *like.shape))
        stream, *taps = receive(message, self._axis.rank - 1, self._axis).unbind()
        return stream, taps

    def send(self, stream: Tensor, taps: Sequence[Tensor]) -> None:
        """Pass both on; waits only where the next stage is many steps behind."""
        while self._under_way and self._under_way[0].is_done():
            self._under_way.popleft()
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.popleft().wait()
        message = torch.stack((stream, *taps))
        self._under_way.append(send(message, self._axis.rank + 1, self._axis))
