"""What every kind of experts takes and hands over."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.part import ExpertPart
from musespark.moe.router import Routing
from musespark.parallel.shard import HasTensor, WeightSlot


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

    def to_route_major(self) -> "ExpertOutput":
        """The same output with R = T * K rows in the order of the routes.

        Ranks that sum their rows need this form: it is alike on all of them. The rows of routes
        that are elsewhere are zero.
        """
        if self.route_major:
            return self
        index = self.route_index.flatten()
        rows = self.rows.new_zeros((index.shape[0], self.rows.shape[-1]))
        here = (index >= 0).nonzero().squeeze(1)
        rows[here] = self.rows.index_select(0, index[here])
        own_row = here.new_full(index.shape, -1).index_copy(0, here, here)
        return ExpertOutput(rows, self.route_weights, own_row.view_as(self.route_index), True)


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Activations as NVFP4: value = e2m1 * block scale * global scale."""

    packed: Tensor
    """[T, H / 2] uint8."""
    scales: Tensor
    """[T, H / 16] float8_e4m3fn."""
    global_scale: Tensor
    """[1] or [T] float32."""


Activations = Tensor | QuantizedActivations
"""Pooled, normed activations [T, H], as they are or quantized for experts that want that."""


class Experts(Protocol):
    """A set of routed experts."""

    post_expert_norm: WeightFirstRMSNorm
    part: ExpertPart

    def __call__(self, activations: Activations, routing: Routing) -> ExpertOutput:
        """Run the experts on the tokens that are routed to them."""
        ...

    def plan(self, routing: Routing) -> Routing:
        """The same routing, with what the experts can work out from it ahead of time."""
        ...

    def prepare(self, hidden_states: Tensor) -> Activations:
        """[T, H] in the form the first GEMM reads; a caller may do this ahead of time."""
        ...

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """What the experts take from a checkpoint."""
        ...

    def pack(self) -> None:
        """Move the weights to the machine's fastest layout; their plain form is given up."""
        ...
