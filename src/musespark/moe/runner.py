"""The MoE runner: finished routing and normed activations in, one finished row per token out.

The experts stop after their second GEMM; norm, weights and the sum over routes are the
finalizer's. Whether the result still misses other ranks' routes is known only afterwards, so the
runner asks the finalizer before it reduces, and nobody reduces twice.
"""

from dataclasses import dataclass

from torch import Tensor

from musespark.moe.experts.base import Activations, Experts
from musespark.moe.finalize import AllReduce, Finalized, Finalizer
from musespark.moe.router import Routing


@dataclass(frozen=True, slots=True)
class PreparedInputs:
    """All that the experts need, made ahead of time.

    So the pre-expert norm can fuse with the activations' quantization, and routing can run beside
    the pooler.
    """

    activations: Activations
    """[T, H], pooled and normed, in the form `Experts.prepare` gives."""
    routing: Routing


class MoERunner:
    """Experts, finalizer and the reduction over ranks, in that order."""

    def __init__(
        self, experts: Experts, finalizer: Finalizer, *, combine: AllReduce | None = None
    ) -> None:
        """Wire them up.

        Args:
            experts: this rank's.
            finalizer: theirs.
            combine: where tokens are replicated and experts are not (expert parallelism): sums
                the ranks' finalized rows [T, H]; None: all experts are here.
        """
        self._experts, self._finalizer, self._combine = experts, finalizer, combine

    def plan(self, routing: Routing) -> Routing:
        """The same routing, with what the experts work out from it alone."""
        return self._experts.plan(routing)

    def prepare(self, hidden_states: Tensor, routing: Routing) -> PreparedInputs:
        """Bring pooled, normed activations [T, H] into the experts' form."""
        return PreparedInputs(self._experts.prepare(hidden_states), routing)

    def __call__(self, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Pooled, normed activations [T, H] -> [T, H], complete on every rank."""
        if not hidden_states.shape[0]:
            return hidden_states  # no rows to finalize, and nothing to tell other ranks
        return self.run_prepared(self.prepare(hidden_states, routing))

    def run_prepared(self, inputs: PreparedInputs) -> Tensor:
        """Like calling the runner, on inputs of T >= 1 tokens prepared by the caller."""
        finalized = self.finalize(inputs)
        if self._combine is None or finalized.is_reduced:
            return finalized.hidden_states
        return self._combine(finalized.hidden_states)

    def finalize(self, inputs: PreparedInputs) -> Finalized:
        """Experts and finalizer alone; says whether other ranks' routes are still to be added."""
        output = self._experts(inputs.activations, inputs.routing)
        if self._finalizer.row_reduce is not None:
            output = output.to_route_major()  # the one order that all ranks share
        return self._finalizer(output)
