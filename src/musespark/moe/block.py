"""The compressed MoE block, from the FFN's input to its output at full width."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.modules.linear import ColumnBlock, ReplicatedLinear
from musespark.modules.norms import CentredRMSNorm
from musespark.moe.dispatch import AllToAllRunner
from musespark.moe.experts.build import build_experts, has_nvfp4_experts
from musespark.moe.finalize import Finalizer, FusedSumPath
from musespark.moe.router import Router, Routing
from musespark.moe.runner import MoERunner
from musespark.ops.side_by_side import MAX_TOKENS, in_turn, side_by_side
from musespark.parallel.collectives import all_reduce
from musespark.parallel.layout import ONE_PROCESS, Layout
from musespark.parallel.placement import HERE, Placement

Runner = MoERunner | AllToAllRunner


class CompressedMoE(nn.Module):
    """pooler (D -> H), experts at width H, unpooler (H -> D).

    routing = router(f)                                  # at width D, float32
    h = pre_expert_norm(f @ Wpool)                       # the product is rounded before the norm
    b = finalize(experts(h, routing)) @ Wunpool          # the runner; experts stop after GEMM2

    On many ranks router and projections are everywhere, and the experts are handed out or cut.
    Where all ranks hold the same tokens, each computes what its experts add to them, and the parts
    are summed; where each holds tokens of its own, their rows travel.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer_index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layout: Layout = ONE_PROCESS,
    ) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_hidden_size
        self.gate = Router(config, dtype=dtype, device=device)
        shared = layout.projection_axis
        self.pre_expert_proj = ReplicatedLinear(
            hidden, width, axis=shared, dtype=dtype, device=device, sums=layout.sums
        )
        self.pre_expert_norm = CentredRMSNorm(
            width, config.rms_norm_eps, dtype=dtype, device=device
        )
        self.experts = build_experts(config, layer_index, dtype=dtype, device=device, layout=layout)
        self.post_expert_proj = ReplicatedLinear(
            width,
            hidden,
            axis=shared,
            dtype=dtype,
            device=device,
            min_tokens=layout.min_unpooler_tokens,
            sums=layout.sums,
        )
        self._side_by_side = side_by_side(device)
        self.runs_on_cut_tokens = runs_on_cut_tokens(config, layer_index, layout)
        self._run_experts, self._run_on_cut = self._runners(layout)

    def pack(self) -> None:
        """Have the pooler write its columns in the order in which the experts read them."""
        order = self.experts.order_inputs()
        if order is not None:
            self.pre_expert_proj.permute_rows(order)
            self.pre_expert_norm.permute(order)

    @property
    def waits_for_device(self) -> bool:
        """Whether rows travel even where all tensor ranks hold the same tokens."""
        return isinstance(self._run_experts, AllToAllRunner)

    def forward(self, hidden_states: Tensor, place: Placement = HERE) -> Tensor | ColumnBlock:
        """The rows at `place` -> as many, [., D]; rows that are padding reach no expert.

        For few tokens that all ranks hold, the result may be this rank's block of columns.
        """
        if not place.is_cut:
            return self._on_the_same_tokens(hidden_states, place.padding)
        if self.runs_on_cut_tokens:
            routing, pooled = self._route_and_pool(
                hidden_states,
                place.padding,
                lambda x: self.pre_expert_norm(self.pre_expert_proj(x)),
                self._run_on_cut,
            )
            return self.post_expert_proj(self._run_on_cut(pooled, routing))
        everybody = self._on_the_same_tokens(place.gather(hidden_states), place.whole.padding)
        return place.shard(everybody.gather() if isinstance(everybody, ColumnBlock) else everybody)

    def _on_the_same_tokens(
        self, hidden_states: Tensor, padding: Tensor | None
    ) -> Tensor | ColumnBlock:
        """[T, D], alike on all ranks of a group -> [T, D], or the columns of this rank."""
        routing, pooled = self._route_and_pool(
            hidden_states,
            padding,
            lambda x: self.pre_expert_proj.normed(x, self.pre_expert_norm),
            self._run_experts,
        )
        return self.post_expert_proj.columns(self._run_experts(pooled, routing))

    def _route_and_pool(
        self,
        hidden_states: Tensor,
        padding: Tensor | None,
        pool: Callable[[Tensor], Tensor],
        runner: Runner,
    ) -> tuple[Routing, Tensor]:
        together = self._side_by_side if hidden_states.shape[0] <= MAX_TOKENS else in_turn
        return together(
            lambda: runner.plan(self.gate(hidden_states, padding)),
            lambda: pool(hidden_states),  # [T, H], normed
        )

    def _runners(self, layout: Layout) -> tuple[Runner, Runner]:
        """(for tokens that all tensor-parallel ranks hold, for tokens that each has its own of)."""
        axis, norm = layout.expert, self.experts.post_expert_norm
        cut = self.experts.part.gives_partial_sums
        row_reduce = partial(all_reduce, axis=layout.tensor) if cut else None
        fused = [FusedSumPath(norm, layout.sums, rows_are_partial=cut)] if layout.sums else []
        finalizer = Finalizer(norm, row_reduce=row_reduce, fused_paths=fused)
        combine = partial(all_reduce, axis=axis) if axis.size > 1 else None
        same_tokens = MoERunner(self.experts, finalizer, combine=combine)
        if not (layout.exchanges_rows and self.runs_on_cut_tokens):
            return same_tokens, same_tokens
        exchange = AllToAllRunner(self.experts, Finalizer(norm), axis)
        # Other replicas hold other tokens, so there rows travel even where one replica's are alike.
        return (exchange if layout.mesh.data.size > 1 else same_tokens), exchange


def runs_on_cut_tokens(config: DecoderConfig, layer_index: int, layout: Layout) -> bool:
    """Whether the FFN of this layer can run where each rank holds tokens of its own.

    Dense layers are shared by features and need all tokens. So do the few layers whose experts
    stayed in 16 bits beside NVFP4 ones, unless replicas have tokens of their own anyway: a sum over
    ranks is cheaper for them than an exchange of wide rows.
    """
    if config.layers[layer_index].mlp != "sparse" or not layout.exchanges_rows:
        return False
    kept_wide = config.quantization is not None and not has_nvfp4_experts(config, layer_index)
    return not kept_wide or layout.mesh.data.size > 1
