"""The gated float32 residual stream, and boundaries that are deferred until they can be fused.

A sub-layer does not blend its branch into the stream. It hands over both, with the post-norm and
the gate that will blend them, and whoever norms the stream next does all three in one step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.linear import ColumnBlock
from musespark.modules.norms import RMSNorm, WeightFirstRMSNorm
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.precision import wide_dtype
from musespark.ops.residual_gate import residual_gate
from musespark.parallel.rank_sums import PartialSums, RankSums


class ResidualGate(nn.Module):
    """Per-channel weights of stream (alpha) and branch (beta), from one learned vector."""

    alpha: Tensor
    beta: Tensor

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.kernels = choose_kernels(device, dtype)
        self._temperature = config.residual_gate_temperature
        gate = torch.empty(config.hidden_size, dtype=wide_dtype(dtype), device=device)
        self.gate = nn.Parameter(gate, requires_grad=False)
        self.register_buffer("alpha", torch.empty_like(gate), persistent=False)
        self.register_buffer("beta", torch.empty_like(gate), persistent=False)

    def finish_loading(self) -> None:
        """Compute both coefficients, once."""
        alpha, beta = residual_gate(self.gate, self._temperature)
        self.alpha.copy_(alpha)
        self.beta.copy_(beta)


@dataclass(frozen=True, slots=True)
class ResidualStream:
    """A stream and a branch that waits to be blended into it."""

    stream: Tensor
    """[T, D] float32."""
    branch: Tensor
    """[T, D] in the compute dtype."""
    gate: ResidualGate
    post_norm: WeightFirstRMSNorm | None
    """The branch's norm; None: the norm without a weight."""
    post_eps: float

    def boundary(self, pre_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Blend, then norm: (input of the next sub-layer [T, D], new stream [T, D] float32)."""
        residual_boundary = self.gate.kernels.residual_boundary
        return residual_boundary(*self._blending(), pre_norm.gain, pre_norm.eps)

    def blend(self) -> Tensor:
        """Blend only: the new stream [T, D] float32."""
        return self.gate.kernels.blend(*self._blending())

    def _boundary_over_ranks(self, sums: RankSums, pre_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """`boundary`, of a branch that lies in parts on all ranks."""
        return sums.boundary(*self._blending(), pre_norm.gain, pre_norm.eps)

    def _blending(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, float]:
        """What every way to blend takes, in this order."""
        return (
            self.stream,
            self.branch,
            self.gate.alpha,
            self.gate.beta,
            None if self.post_norm is None else self.post_norm.gain,
            self.post_eps,
        )


@dataclass(frozen=True, slots=True)
class ColumnShardedStream(ResidualStream):
    """A deferred boundary whose branch [T, D / size] is still this rank's block of columns.

    The blocks are gathered by the boundary that consumes them.
    """

    block: ColumnBlock

    def materialize(self) -> ResidualStream:
        """The same boundary with the whole branch."""
        branch = self.block.gather()
        return ResidualStream(self.stream, branch, self.gate, self.post_norm, self.post_eps)

    def boundary(self, pre_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Gather, blend and norm, in one step where there is a kernel for that."""
        if self.block.sums is None:
            return self.materialize().boundary(pre_norm)
        return self._boundary_over_ranks(self.block.sums, pre_norm)

    def blend(self) -> Tensor:
        """Gather, then as for a whole branch."""
        return self.materialize().blend()


@dataclass(frozen=True, slots=True)
class PartialSumStream(ResidualStream):
    """A deferred boundary whose branch [T, D] is still this rank's part of a sum over ranks."""

    parts: PartialSums

    def boundary(self, pre_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Sum over ranks, blend and norm in one step."""
        return self._boundary_over_ranks(self.parts.sums, pre_norm)

    def blend(self) -> Tensor:
        """Sum, then as for a whole branch."""
        branch = self.parts.sum()
        whole = ResidualStream(self.stream, branch, self.gate, self.post_norm, self.post_eps)
        return whole.blend()


def unblended(
    stream: Tensor,
    branch: Tensor | ColumnBlock | PartialSums,
    gate: ResidualGate,
    post_norm: WeightFirstRMSNorm | None,
    post_eps: float,
) -> ResidualStream:
    """The deferred boundary for a branch in whatever form its sub-layer left it."""
    if isinstance(branch, ColumnBlock):
        return ColumnShardedStream(stream, branch.values, gate, post_norm, post_eps, branch)
    if isinstance(branch, PartialSums):
        return PartialSumStream(stream, branch.values, gate, post_norm, post_eps, branch)
    return ResidualStream(stream, branch, gate, post_norm, post_eps)
