"""NVFP4 experts with NVFP4 activations (W4A4): the numerics of tensor cores that multiply FP4.

An emulation: every product of two NVFP4 numbers is exact in float32, where it is accumulated.

    gate_up = hq @ Wgate_up[e]                         # hq: codes of h / a13
    act     = silu(a13 * s_gate[e] * gate) * (a13 * s_up[e] / a2 * up)
    row     = b( a2 * s_down[e] * (actq @ Wdown[e]) )  # actq: codes of act, already h / a2

a13 and a2 are the activations' global scales: static ones, the maxima of the checkpoint's input
scales, or where those were never calibrated (exactly 1.0) one per token, from its own maximum.
The factor 1 / a2 belongs to the up half; the gate half feeds silu and must keep its true size.
"""

import torch
from torch import Tensor

from musespark.moe.experts.base import Activations, ExpertOutput, QuantizedActivations
from musespark.moe.experts.nvfp4 import NVFP4Experts
from musespark.moe.router import Routing
from musespark.ops.expert_permute import group_by_expert
from musespark.ops.nvfp4 import dequantize, global_scale, quantize
from musespark.ops.scaled_silu_mul import scaled_silu_mul

_UNCALIBRATED = 1.0


class NVFP4W4A4Experts(NVFP4Experts):
    """NVFP4 experts that see their inputs through NVFP4 as well."""

    takes_plain_activations = False
    input_scale: Tensor | None
    """[1] float32: a13, if it is static."""
    inner_scale: Tensor | None
    """[1] float32: a2, if it is static."""

    def finish_loading(self) -> None:
        """Take the static activation scales, if the checkpoint has any."""
        gate, up = self.gate_up_proj_weight_scale_2.unbind(1)
        self._gate_scale, self._up_scale = gate.contiguous(), up.contiguous()
        self.input_scale = _static_scale(self.gate_up_proj_input_scale)
        self.inner_scale = _static_scale(self.down_proj_input_scale)

    def prepare(self, hidden_states: Tensor) -> QuantizedActivations:
        """Quantize pooled, normed activations [T, H] with a13, or each token with its own scale."""
        scale = self.input_scale
        if scale is None:
            scale = global_scale(hidden_states, dim=(-1,)).squeeze(-1)
        return QuantizedActivations(*quantize(hidden_states, scale[:, None]), scale)

    def forward(self, activations: Activations, routing: Routing) -> ExpertOutput:
        """Run the experts on activations [T, H], quantized by `prepare` or not yet."""
        if isinstance(activations, Tensor):
            activations = self.prepare(activations)
        groups = group_by_expert(routing.ids, self.part.num_experts_here, self.part.first_expert)
        group_ends = groups.group_ends.tolist()
        experts = groups.expert_index()  # [R]
        a13 = activations.global_scale
        if a13.shape[0] > 1:
            a13 = a13.index_select(0, groups.token_index)
        h = dequantize(activations.packed, activations.scales)
        gate_up = self._gate_up(h.index_select(0, groups.token_index), group_ends)  # float32
        gate_scale, up_scale = a13 * self._gate_scale[experts], a13 * self._up_scale[experts]
        inner, a2 = self._requantize(gate_up, gate_scale, up_scale)
        rows = (
            self._down(inner, group_ends) * (a2 * self.down_proj_weight_scale_2[experts])[:, None]
        )
        return ExpertOutput(
            rows.to(self.dtype), routing.weights, groups.route_index, route_major=False
        )

    def _requantize(
        self, gate_up: Tensor, gate_scale: Tensor, up_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[R, 2I] -> (e2m1 * block scale of the activation [R, I] float32, a2 [1] or [R])."""
        if self.inner_scale is not None:
            a2 = self.inner_scale
            inner = scaled_silu_mul(gate_up, gate_scale, up_scale / a2)
        else:
            inner = scaled_silu_mul(gate_up, gate_scale, up_scale)
            a2 = global_scale(inner, dim=(-1,)).squeeze(-1)
            inner = inner / a2[:, None]
        return dequantize(*quantize(inner, 1.0)), a2


def _static_scale(input_scales: Tensor) -> Tensor | None:
    """The largest calibrated scale of all experts, [1]; None if none was calibrated."""
    calibrated = input_scales[input_scales != _UNCALIBRATED]
    return calibrated.max().to(torch.float32).reshape(1) if calibrated.numel() else None
