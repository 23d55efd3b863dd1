"""The finalizer: from un-finalized expert rows to one row per token."""

from torch import Tensor

from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import ExpertOutput
from musespark.ops.expert_finalize import expert_finalize


class Finalizer:
    """Post-expert norm per route, then the weighted sum over a token's routes."""

    def __init__(self, norm: WeightFirstRMSNorm) -> None:
        self._norm = norm

    def __call__(self, output: ExpertOutput) -> Tensor:
        """[R, H] rows -> [T, H], in the rows' dtype."""
        return expert_finalize(
            output.rows,
            output.route_weights,
            output.route_index,
            self._norm.gain,
            self._norm.eps,
        )
