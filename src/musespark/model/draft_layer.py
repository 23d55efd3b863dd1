"""The layer of a draft: attention over injected context and the block itself, dense feed-forward.

Its variants (norms with and without weights, gated or plain residual, with or without QK-norm,
output norm, output gate, RoPE) differ in coefficients and in a few functions, which are chosen when
the layer is built. A draft is small and runs whole on one rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from musespark.config.draft import DraftConfig
from musespark.model.kv_cache import LayerCache
from musespark.modules.linear import FusedLinear, Linear
from musespark.modules.norms import RMSNorm
from musespark.ops.attention_block import BlockView, attention_block
from musespark.ops.kernel_set import choose_kernels
from musespark.ops.kv_write import kv_write
from musespark.ops.precision import wide_dtype
from musespark.ops.qk_norm_rope import qk_norm_rope, rotate
from musespark.ops.residual_gate import residual_gate
from musespark.parallel.shard import HasTensor, WeightSlot, copy_into, weight_slots

# Of the gates' sigmoid: in no config file, fixed by the published implementation.
GATE_TEMPERATURE = 0.3


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What a layer must know of the tokens of a step's blocks, besides their hidden states."""

    view: BlockView
    """What they see, on a layer of this window."""
    angles: tuple[Tensor, Tensor] | None
    """(cos, sin), each [B * N, head_dim / 2]; None on a layer without RoPE."""
    query_scale: Tensor | None
    """[B * N, 1, 1] in the wide dtype; None where attention has no temperature."""


class DraftNorm(RMSNorm):
    """rms(x) * (centre + w), or rms(x) where there is no weight."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        centre: float,
        affine: bool = True,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(width, eps, dtype=dtype, device=device)
        self._centre, self._affine = centre, affine

    def weight_slots(self, prefix: str, _has: HasTensor) -> Iterator[WeightSlot]:
        """Nothing where there is no weight."""
        if self._affine:
            yield WeightSlot(f"{prefix}weight", tuple(self.weight.shape), copy_into(self.weight))

    def finish_loading(self) -> None:
        if self._affine:
            self.gain.copy_(self.weight).add_(self._centre)
        else:
            self.gain.fill_(1)


class Boundary(nn.Module):
    """What follows a sub-layer: its branch is normed, weighed and added to the stream.

    stream' = alpha * stream + beta * post,   post = rms(branch) * g,  or  rms(branch * g)

    With a gate, alpha and beta come from it; without one both are 1. A gain behind the norm is
    part of beta, so that every variant is one call of the same op.
    """

    alpha: Tensor
    beta: Tensor
    gain: Tensor

    def __init__(
        self,
        config: DraftConfig,
        *,
        residual_index: int,
        affine: bool,
        scale_input: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`scale_input`: the norm's weight multiplies before the norm instead of after it."""
        super().__init__()
        self.kernels = choose_kernels(device, dtype)
        self._eps = config.rms_post_norm_eps
        self._centre = config.gain_center(residual_index)
        self._affine, self._scale_input = affine, scale_input
        self._gated = config.use_residual_gate
        # The stream is rounded where the draft was trained so.
        self._rounded = dtype if config.residual_dtype == "bf16" else None
        width, wide = config.hidden_size, wide_dtype(dtype)
        empty = torch.empty(width, dtype=wide, device=device)
        self.gate = nn.Parameter(empty, requires_grad=False)
        self.weight = nn.Parameter(empty.to(dtype, copy=True), requires_grad=False)
        for name in ("alpha", "beta", "gain"):
            self.register_buffer(name, torch.ones_like(empty), persistent=False)

    def slots(self, norm_name: str, gate_name: str) -> Iterator[WeightSlot]:
        """The norm's and the gate's tensors, where there are any."""
        shape = tuple(self.weight.shape)
        if self._affine:
            yield WeightSlot(norm_name, shape, copy_into(self.weight))
        if self._gated:
            yield WeightSlot(gate_name, shape, copy_into(self.gate))

    def finish_loading(self) -> None:
        """Compute the coefficients, once."""
        self.beta.fill_(1)
        if self._gated:
            alpha, beta = residual_gate(self.gate, GATE_TEMPERATURE)
            self.alpha.copy_(alpha)
            self.beta.copy_(beta)
        if self._affine:
            self.gain.copy_(self.weight).add_(self._centre)
            if not self._scale_input:
                self.beta.mul_(self.gain)

    def forward(self, stream: Tensor, branch: Tensor, pre_norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """(the next sub-layer's input [T, D], the new stream [T, D] in the stream's dtype)."""
        post_gain = self.gain if self._affine and self._scale_input else None
        blending = (branch, self.alpha, self.beta, post_gain, self._eps)
        if self._rounded is None:
            return self.kernels.residual_boundary(stream, *blending, pre_norm.gain, pre_norm.eps)
        stream = self.kernels.blend(stream.to(self.beta.dtype), *blending).to(self._rounded)
        return pre_norm(stream, out_dtype=branch.dtype), stream


class DraftAttention(nn.Module):
    """o_proj( gate(norm(attention(q, k, v))) ) over the injected context and the block."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.kernels = choose_kernels(device, dtype)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        self.eps = config.rms_norm_eps
        self._norms_qk = config.use_qk_norm
        heads = choose_kernels(device, dtype, config.head_dim)
        self._qk_norm_rope_write = heads.qk_norm_rope_write
        hidden, q_size = config.hidden_size, self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.pre_qkv_proj_norm = DraftNorm(
            hidden,
            self.eps,
            centre=config.pre_norm_center,
            affine=config.norm_affine,
            dtype=dtype,
            device=device,
        )
        # Context needs keys and values only.
        gate = {"o_gate_proj": q_size} if config.use_attn_o_gate else {}
        self.q_proj = FusedLinear(hidden, {"q_proj": q_size} | gate, dtype=dtype, device=device)
        parts = {"k_proj": kv_size, "v_proj": kv_size}
        self.kv_proj = FusedLinear(hidden, parts, dtype=dtype, device=device)
        self.o_proj = Linear(q_size, hidden, dtype=dtype, device=device)
        self._finish = self._choose_finish(config.use_attn_o_norm, config.use_attn_o_gate)

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """The projections stand apart in a checkpoint, q and k rows in the order of pairs."""
        yield from weight_slots(self.pre_qkv_proj_norm, f"{prefix}pre_qkv_proj_norm.", has)
        for slot in (*self.q_proj.part_slots(prefix), *self.kv_proj.part_slots(prefix)):
            if slot.name.removeprefix(prefix) in ("q_proj.weight", "k_proj.weight"):
                yield WeightSlot(slot.name, slot.shape, self._from_pairs(slot.store))
            else:
                yield slot
        yield from weight_slots(self.o_proj, f"{prefix}o_proj.", has)

    def _from_pairs(self, store: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Rows of each head from [1st of pairs, 2nd of pairs, ...] to [all 1sts | all 2nds].

        This project rotates halves. Queries and keys take the same order, so scores are the same.
        """

        def reordered(rows: Tensor) -> None:
            pairs = rows.unflatten(0, (-1, self.head_dim // 2, 2))
            store(pairs.transpose(1, 2).flatten(0, 2))

        return reordered

    def _choose_finish(self, norm: bool, gate: bool) -> Callable[[Tensor, Tensor], Tensor]:
        """What happens to heads' outputs [T, heads, head_dim]; gates likewise, or [T, 0, ...]."""
        kernels, eps = self.kernels, self.eps
        if norm and gate:
            return lambda out, gates: kernels.output_gate(out, gates, eps)
        if norm:
            return lambda out, _: kernels.rms_norm(out, None, eps)
        if gate:
            wide = self.pre_qkv_proj_norm.gain.dtype
            return lambda out, gates: (out * gates.to(wide).sigmoid()).to(out.dtype)
        return lambda out, _: out

    def write_context(
        self,
        hidden_states: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        slot_mapping: Tensor,
        cache: LayerCache,
    ) -> None:
        """Put the keys and values of context [T, D] into the cache's rows [T]."""
        kv = self.kv_proj(self.pre_qkv_proj_norm(hidden_states)).unflatten(-1, (-1, self.head_dim))
        if self._norms_qk:  # one kernel, for no queries
            self._qk_norm_rope_write(kv, 0, self.eps, angles, cache.key, cache.value, slot_mapping)
            return
        key, value = kv.split(self.num_kv_heads, dim=1)
        key = self._norm_and_rotate(key, angles)
        kv_write(key, value, cache.key, cache.value, slot_mapping)

    def _norm_and_rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        if self._norms_qk:
            return qk_norm_rope(heads, self.eps, angles)
        return heads if angles is None else rotate(heads, *angles)

    def forward(self, hidden_states: Tensor, inputs: BlockInputs, cache: LayerCache) -> Tensor:
        """[B * N, D], normed -> [B * N, D]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        query, gates = (
            self.q_proj(hidden_states)
            .unflatten(-1, (-1, self.head_dim))
            .tensor_split((heads,), dim=1)
        )
        kv = self.kv_proj(hidden_states).unflatten(-1, (-1, self.head_dim))
        key, value = kv.split(kv_heads, dim=1)
        qk = self._norm_and_rotate(torch.cat((query, key), dim=1), inputs.angles)
        query, key = qk.split((heads, kv_heads), dim=1)
        if inputs.query_scale is not None:
            query = (query * inputs.query_scale).to(query.dtype)
        block = (-1, inputs.view.mask.shape[1])
        attended = attention_block(
            query.unflatten(0, block),
            key.unflatten(0, block),
            value.unflatten(0, block),
            cache.key,
            cache.value,
            inputs.view,
            self.scale,
        )
        attended = attended.flatten(0, 1).contiguous()  # [B * N, heads, head_dim]
        return self.o_proj(self._finish(attended, gates).flatten(1))


class DraftFeedForward(nn.Module):
    """down_proj( silu(gate_proj(x)) * up_proj(x) )."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        parts = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = FusedLinear(hidden, parts, dtype=dtype, device=device)
        self.down_proj = Linear(width, hidden, dtype=dtype, device=device)
        self._silu_mul = choose_kernels(device, dtype).silu_mul

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """Gate and up stand apart in a checkpoint."""
        yield from self.gate_up_proj.part_slots(prefix)
        yield from weight_slots(self.down_proj, f"{prefix}down_proj.", has)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down_proj(self._silu_mul(self.gate_up_proj(hidden_states)))


class DraftLayer(nn.Module):
    """s = blend(s, attention(norm(s)));  s = blend(s, ffn(norm(s)));  and s normed for the next."""

    def __init__(
        self, config: DraftConfig, index: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, dtype=dtype, device=device)
        self.after_attention = Boundary(
            config,
            residual_index=2 * index + 1,
            affine=config.post_norm_affine,
            dtype=dtype,
            device=device,
        )
        self.pre_ffn_norm = DraftNorm(
            config.hidden_size,
            config.rms_norm_eps,
            centre=config.pre_norm_center,
            affine=config.norm_affine,
            dtype=dtype,
            device=device,
        )
        self.feed_forward = DraftFeedForward(config, dtype=dtype, device=device)
        self.after_ffn = Boundary(
            config,
            residual_index=2 * index + 2,
            affine=config.use_ffn_learnable_scales or config.post_norm_affine,
            scale_input=config.use_ffn_learnable_scales,
            dtype=dtype,
            device=device,
        )

    def weight_slots(self, prefix: str, has: HasTensor) -> Iterator[WeightSlot]:
        """A boundary's norm and gate have names of their own."""
        yield from weight_slots(self.self_attn, f"{prefix}self_attn.", has)
        yield from self.after_attention.slots(
            f"{prefix}post_attn_norm.weight", f"{prefix}add_attn.gate"
        )
        yield from weight_slots(self.pre_ffn_norm, f"{prefix}pre_ffn_norm.", has)
        yield from weight_slots(self.feed_forward, f"{prefix}feed_forward.", has)
        yield from self.after_ffn.slots(f"{prefix}post_ffn_norm.weight", f"{prefix}add_ffn.gate")

    def forward(
        self,
        normed: Tensor,
        stream: Tensor,
        inputs: BlockInputs,
        cache: LayerCache,
        next_norm: RMSNorm,
    ) -> tuple[Tensor, Tensor]:
        """(input of what follows [T, D], stream [T, D]) from this layer's own."""
        branch = self.self_attn(normed, inputs, cache)
        normed, stream = self.after_attention(stream, branch, self.pre_ffn_norm)
        return self.after_ffn(stream, self.feed_forward(normed), next_norm)
