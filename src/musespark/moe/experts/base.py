"""What every kind of experts hands over."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from musespark.moe.router import Routing


@dataclass(frozen=True, slots=True)
class ExpertOutput:
    """Un-finalized output of the experts: one row per route."""

    rows: Tensor
    """[R, H] in the compute dtype, the second GEMM's output."""
    route_weights: Tensor
    """[T, K] float32."""
    route_index: Tensor
    """[T, K] int64: the row of route (t, k), or -1 where it is not on this rank."""
    route_major: bool
    """Whether row t * K + k is route (t, k), so that R = T * K."""


class Experts(Protocol):
    """A set of routed experts."""

    def __call__(self, hidden_states: Tensor, routing: Routing) -> ExpertOutput:
        """Run the experts on pooled, normed activations [T, H]."""
        ...
