"""Which functions compute the operations: chosen once, by device and dtype, when a model is built.

Every field is an operation of this package; the function behind it has the documentation. On a CPU,
and wherever Triton is missing, they are the plain PyTorch versions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from musespark.ops.attention_paged import (
    SequencesOnDevice,
    attention_paged,
    attention_paged_triton,
    sequences_on_device,
)
from musespark.ops.expert_finalize import expert_finalize, expert_finalize_triton
from musespark.ops.expert_permute import ExpertGroups, group_by_expert, group_by_expert_triton
from musespark.ops.output_gate import output_gate, output_gate_triton
from musespark.ops.qk_norm_rope import qk_norm_rope_write, qk_norm_rope_write_triton
from musespark.ops.residual_boundary import (
    blend,
    blend_triton,
    residual_boundary,
    residual_boundary_triton,
)
from musespark.ops.rms_norm import rms_norm, rms_norm_triton
from musespark.ops.route_topk import route, route_triton
from musespark.ops.router_gemm import split_weight
from musespark.ops.sample_filter import filter_logits, filter_logits_triton
from musespark.ops.silu_mul import silu_mul, silu_mul_triton
from musespark.ops.soft_cap import soft_cap, soft_cap_triton
from musespark.ops.triton_import import HAS_TRITON, next_power_of_2


@dataclass(frozen=True, slots=True)
class KernelSet:
    """One function per operation."""

    waits_for_device: bool
    """Whether some function asks the device for numbers, which no CUDA graph can record."""
    rms_norm: Callable[..., Tensor]
    residual_boundary: Callable[..., tuple[Tensor, Tensor]]
    blend: Callable[..., Tensor]
    qk_norm_rope_write: Callable[..., Tensor]
    sequences_on_device: Callable[..., SequencesOnDevice | None]
    """Sends a step's sequences where kernels can read them; None: they need not be sent."""
    attention_paged: Callable[..., Tensor]
    output_gate: Callable[..., Tensor]
    route: Callable[..., tuple[Tensor, Tensor]]
    split_router_weight: Callable[[Tensor], Tensor] | None
    """Makes `planes` for `route`, once; None: it takes none."""
    group_by_expert: Callable[..., ExpertGroups]
    expert_finalize: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    soft_cap: Callable[[Tensor, float, float], Tensor]
    filter_logits: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@cache
def torch_kernels() -> KernelSet:
    """Plain PyTorch, on any device and in any dtype."""
    return KernelSet(
        waits_for_device=True,
        rms_norm=rms_norm,
        residual_boundary=residual_boundary,
        blend=blend,
        qk_norm_rope_write=qk_norm_rope_write,
        sequences_on_device=lambda *_: None,
        attention_paged=attention_paged,
        output_gate=output_gate,
        route=route,
        split_router_weight=None,
        group_by_expert=group_by_expert,
        expert_finalize=expert_finalize,
        silu_mul=silu_mul,
        soft_cap=soft_cap,
        filter_logits=filter_logits,
    )


@cache
def triton_kernels() -> KernelSet:
    """Triton's kernels, for bfloat16 and float32 on a GPU."""
    return KernelSet(
        waits_for_device=False,
        rms_norm=rms_norm_triton,
        residual_boundary=residual_boundary_triton,
        blend=blend_triton,
        qk_norm_rope_write=qk_norm_rope_write_triton,
        sequences_on_device=sequences_on_device,
        attention_paged=attention_paged_triton,
        output_gate=output_gate_triton,
        route=route_triton,
        split_router_weight=split_weight,
        group_by_expert=group_by_expert_triton,
        expert_finalize=expert_finalize_triton,
        silu_mul=silu_mul_triton,
        soft_cap=soft_cap_triton,
        filter_logits=filter_logits_triton,
    )


def choose_kernels(
    device: torch.device, dtype: torch.dtype, head_dim: int | None = None
) -> KernelSet:
    """The fastest functions for a model that computes in `dtype` on `device`.

    Whoever deals with attention names the `head_dim`: the kernels take powers of two from 16 on.
    """
    is_suited = HAS_TRITON and device.type == "cuda" and dtype in (torch.bfloat16, torch.float32)
    if head_dim is not None:
        is_suited = is_suited and head_dim >= 16 and head_dim == next_power_of_2(head_dim)
    return triton_kernels() if is_suited else torch_kernels()
