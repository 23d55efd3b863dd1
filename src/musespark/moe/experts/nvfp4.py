"""NVFP4 experts, as ModelOpt stores them, multiplied by 16-bit activations (W4A16).

    gate_up = h @ Wgate_up[e]                     # e2m1 * block scale, exact in bfloat16
    act     = b( silu(s_gate[e] * gate) * (s_up[e] * s_down[e] * up) )
    row     = act @ Wdown[e]

s_gate, s_up and s_down are the global scales `*_weight_scale_2`. Gate and up have one each, which
differ by up to 10x: silu must see the scaled gate. The down projection is linear, so its scale
moves to its input, in float32, before the one rounding that happens there anyway.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from musespark.config.model import DecoderConfig
from musespark.errors import ConfigError
from musespark.modules.norms import WeightFirstRMSNorm
from musespark.moe.experts.base import Activations, ExpertOutput
from musespark.moe.experts.part import ExpertPart
from musespark.moe.experts.slots import (
    down_slot,
    gate_up_slots,
    single_expert_slots,
    stored_one_by_one,
)
from musespark.moe.router import Routing
from musespark.ops import routed_experts
from musespark.ops.expert_permute import group_by_expert
from musespark.ops.nvfp4 import GROUP_SIZE
from musespark.ops.nvfp4_grouped_gemm import nvfp4_grouped_gemm, pack_nvfp4_grouped_gemm
from musespark.ops.nvfp4_hopper import HopperNVFP4Experts, permuted_columns, runs_on
from musespark.ops.precision import wide_dtype
from musespark.ops.routed_experts import RoutedExperts
from musespark.ops.scaled_silu_mul import scaled_silu_mul
from musespark.parallel.shard import HasTensor, WeightSlot, copy_into, weight_slots

_CODES = (torch.uint8,)
_BLOCK_SCALES = (torch.float8_e4m3fn,)


class NVFP4Experts(nn.Module):
    """y = ( silu(h @ Wgate[e]) * (h @ Wup[e]) ) @ Wdown[e] for every route, on packed weights."""

    gate_up_proj: nn.Parameter | None
    gate_up_proj_weight_scale: nn.Parameter | None
    gate_up_proj_weight_scale_2: nn.Parameter
    gate_up_proj_input_scale: nn.Parameter
    down_proj: nn.Parameter | None
    down_proj_weight_scale: nn.Parameter | None
    down_proj_weight_scale_2: nn.Parameter
    down_proj_input_scale: nn.Parameter
    takes_plain_activations = True
    """Whether activations enter the products as they are."""
    keeps_plain_weights = False
    """Whether `pack` does nothing, and every product reads the checkpoint's own layout."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        part: ExpertPart | None = None,
    ) -> None:
        """Weights are left uninitialized.

        Args:
            config: the model.
            dtype: of the activations.
            device: where the weights live.
            part: this rank's share; None: all.
        """
        super().__init__()
        part = part or ExpertPart.whole(config)
        _check_granularity(config, part)
        self.part, self.dtype = part, dtype
        here, inner, width = part.num_experts_here, part.inner_size, config.moe_hidden_size

        def weight(kind: torch.dtype, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=kind, device=device), requires_grad=False)

        codes, scale, real = torch.uint8, torch.float8_e4m3fn, torch.float32
        self.gate_up_proj = weight(codes, here, 2 * inner, width // 2)
        self.gate_up_proj_weight_scale = weight(scale, here, 2 * inner, width // GROUP_SIZE)
        self.gate_up_proj_weight_scale_2 = weight(real, here, 2)
        self.gate_up_proj_input_scale = weight(real, part.num_experts, 2)
        self.down_proj = weight(codes, here, width, inner // 2)
        self.down_proj_weight_scale = weight(scale, here, width, inner // GROUP_SIZE)
        self.down_proj_weight_scale_2 = weight(real, here)
        self.down_proj_input_scale = weight(real, part.num_experts)
        self.post_expert_norm = WeightFirstRMSNorm(
            width, config.post_norm_eps, dtype=dtype, device=device
        )
        self._on_gpu: HopperNVFP4Experts | RoutedExperts | None = None
        self._input_is_permuted = False
        self._gate_up = nvfp4_grouped_gemm(self.gate_up_proj, self.gate_up_proj_weight_scale)
        self._down = nvfp4_grouped_gemm(self.down_proj, self.down_proj_weight_scale)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """All experts in one set of tensors, or one set per expert and projection.

        Input scales are taken of all experts, wherever they are: the scale in use is the maximum.
        """
        assert self.gate_up_proj is not None
        assert self.gate_up_proj_weight_scale is not None
        assert self.down_proj is not None
        assert self.down_proj_weight_scale is not None
        yield from weight_slots(self.post_expert_norm, f"{prefix}post_expert_norm.", has)
        gate_up, down = self.gate_up_proj, self.down_proj
        gate_up_scale, down_scale = self.gate_up_proj_weight_scale, self.down_proj_weight_scale
        if stored_one_by_one(prefix, has):
            part = self.part
            yield from single_expert_slots(prefix, "weight", gate_up, down, part, _CODES)
            yield from single_expert_slots(
                prefix, "weight_scale", gate_up_scale, down_scale, part, _BLOCK_SCALES
            )
            yield from self._single_scalar_slots(prefix)
            return
        gate_up_key, down_key = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        yield from gate_up_slots(gate_up_key, gate_up, self.part, _CODES)
        yield from gate_up_slots(
            f"{gate_up_key}_weight_scale", gate_up_scale, self.part, _BLOCK_SCALES
        )
        yield down_slot(down_key, down, self.part, _CODES)
        yield down_slot(f"{down_key}_weight_scale", down_scale, self.part, _BLOCK_SCALES)
        yield from self._scalar_slots(prefix)

    def finish_loading(self) -> None:
        """Form the scale of each half of the first product, in the accumulators' dtype."""
        gate, up = self.gate_up_proj_weight_scale_2.to(wide_dtype(self.dtype)).unbind(1)
        self._gate_scale = gate.contiguous()  # [E]
        self._up_scale = up * self.down_proj_weight_scale_2  # [E]

    def order_inputs(self) -> Tensor | None:
        """[H], the column at each place of the inputs wanted from now on; None: as before."""
        if self.keeps_plain_weights or not self._suits_hopper():
            return None
        assert self.down_proj is not None
        self._input_is_permuted = True
        return permuted_columns(self.down_proj.shape[1], self.down_proj.device)

    def _suits_hopper(self) -> bool:
        """Whether `pack` will take, or would, the kernel for Hopper GPUs."""
        down = self.down_proj
        if down is None or not self.takes_plain_activations or self.dtype != torch.bfloat16:
            return False
        return runs_on(down.device, down.shape[1], self.part.inner_size)

    def pack(self) -> None:
        """Rearrange the weights in place for fast look-ups; their plain form is given up."""
        if self.keeps_plain_weights:
            return
        if self._pack_for_gpu():
            return
        for name in ("gate_up", "down"):
            codes = getattr(self, f"{name}_proj")
            scales = getattr(self, f"{name}_proj_weight_scale")
            if codes is not None:
                setattr(self, f"_{name}", pack_nvfp4_grouped_gemm(codes.data, scales.data))
                setattr(self, f"{name}_proj", None)
                setattr(self, f"{name}_proj_weight_scale", None)

    def _pack_for_gpu(self) -> bool:
        """Take the kernels for these widths, if there are any here; says whether it did."""
        gate_up, down = self.gate_up_proj, self.down_proj
        scales, down_scales = self.gate_up_proj_weight_scale, self.down_proj_weight_scale
        if gate_up is None or scales is None or down is None or down_scales is None:
            return False
        if not self.takes_plain_activations:
            return False
        device = gate_up.device
        factors = self.gate_up_proj_weight_scale_2.data, self.down_proj_weight_scale_2.data
        if self._suits_hopper():
            self._on_gpu = HopperNVFP4Experts(
                gate_up.data, scales.data, factors[0], down.data, down_scales.data, factors[1],
                num_routed=self.part.num_experts,
            )  # fmt: skip
        elif routed_experts.takes(device, self.dtype):
            self._on_gpu = RoutedExperts(
                gate_up.data, down.data, (scales.data, down_scales.data), factors
            )
        else:
            return False
        self.gate_up_proj = self.gate_up_proj_weight_scale = None
        self.down_proj = self.down_proj_weight_scale = None
        return True

    @property
    def waits_for_device(self) -> bool:
        """Whether the host must know how many rows each expert has."""
        return self._on_gpu is None

    def plan(self, routing: Routing) -> Routing:
        """The same routing; the kernels' list of work is made ahead."""
        if not isinstance(self._on_gpu, HopperNVFP4Experts) or not self._input_is_permuted:
            return routing
        first_expert = self.part.first_expert or 0
        return replace(routing, work=self._on_gpu.list_work(routing.ids, first_expert=first_expert))

    def prepare(self, hidden_states: Tensor) -> Activations:
        """Activations are multiplied as they are."""
        return hidden_states

    def forward(self, activations: Activations, routing: Routing) -> ExpertOutput:
        """Run the experts on pooled, normed activations [T, H]."""
        assert isinstance(activations, Tensor)
        if self._on_gpu is not None:
            first_expert = self.part.first_expert or 0
            if isinstance(self._on_gpu, HopperNVFP4Experts):
                rows, index = self._on_gpu(
                    activations,
                    routing.ids,
                    first_expert=first_expert,
                    is_permuted=self._input_is_permuted,
                    work=routing.work,
                )
            else:
                rows, index = self._on_gpu(activations, routing.ids, first_expert=first_expert)
            return ExpertOutput(rows, routing.weights, index, route_major=True)
        groups = group_by_expert(routing.ids, self.part.num_experts_here, self.part.first_expert)
        group_ends = groups.group_ends.tolist()
        experts = groups.expert_index()  # [R]
        gate_up = self._gate_up(activations.index_select(0, groups.token_index), group_ends)
        hidden = scaled_silu_mul(gate_up, self._gate_scale[experts], self._up_scale[experts])
        rows = self._down(hidden, group_ends)
        return ExpertOutput(rows, routing.weights, groups.route_index, route_major=False)

    def _scalar_slots(self, prefix: str) -> Iterator[WeightSlot]:
        experts = (self.part.experts,)
        for name in ("gate_up_proj", "down_proj"):
            used = getattr(self, f"{name}_weight_scale_2")
            shape = (self.part.num_experts, *used.shape[1:])
            yield WeightSlot(
                f"{prefix}{name}_weight_scale_2", shape, copy_into(used), index=experts
            )
            target = getattr(self, f"{name}_input_scale")
            yield WeightSlot(f"{prefix}{name}_input_scale", shape, copy_into(target))

    def _single_scalar_slots(self, prefix: str) -> Iterator[WeightSlot]:
        def slots(ending: str, expert: int, gate_up: Tensor, down: Tensor) -> Iterator[WeightSlot]:
            for name, target in (("gate", gate_up[0]), ("up", gate_up[1]), ("down", down)):
                yield WeightSlot(f"{prefix}{expert}.{name}_proj.{ending}", (), copy_into(target))

        for here, expert in enumerate(range(self.part.experts.start, self.part.experts.stop)):
            gate_up, down = self.gate_up_proj_weight_scale_2, self.down_proj_weight_scale_2
            yield from slots("weight_scale_2", expert, gate_up[here], down[here])
        for expert in range(self.part.num_experts):
            gate_up, down = self.gate_up_proj_input_scale, self.down_proj_input_scale
            yield from slots("input_scale", expert, gate_up[expert], down[expert])


def _check_granularity(config: DecoderConfig, part: ExpertPart) -> None:
    """Groups of 16 inputs share a scale: neither width may end, or be cut, inside one."""
    for name, size in (
        ("moe_hidden_size", config.moe_hidden_size),
        ("moe_intermediate_size", part.intermediate),
    ):
        if size % GROUP_SIZE:
            raise ConfigError(
                f"{name}: NVFP4 has one scale per {GROUP_SIZE} inputs, so it must be a multiple "
                f"of {GROUP_SIZE}, found {size}."
            )
    if part.inner_size % GROUP_SIZE:
        raise ConfigError(
            f"tensor_parallel_size: NVFP4 experts with moe_intermediate_size {part.intermediate} "
            f"cannot be cut into shares of {part.inner_size}, which end inside a group of "
            f"{GROUP_SIZE} inputs with one scale. Choose a smaller tensor_parallel_size, or expert "
            "parallelism, which leaves experts whole."
        )
