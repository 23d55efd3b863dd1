"""A Muse Spark text decoder to train: batched, and with every expert computed for every token.

Parameters carry the names and shapes of the Hugging Face checkpoint below `model.language_model.`
and `lm_head`, so exporting is a matter of a prefix. Weights are float32; run it under bfloat16
autocast on a GPU. The residual stream, the norms and the router stay in float32.

Dimensions: N rows of a batch, T tokens of a row, S tokens attended to, D hidden, H expert width,
I intermediate, E experts, K experts a token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import Recipe, Shape


def rms(x: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class Masks:
    """Who may look at whom: masks [N, 1, T, S] of the two kinds of layer, boolean at first."""

    full: Tensor
    sliding: Tensor

    @staticmethod
    def within_documents(
        query_document: Tensor,  # [N, T]
        key_document: Tensor,  # [N, S]
        query_position: Tensor,  # [T]
        key_position: Tensor,  # [S]
        window: int,
    ) -> "Masks":
        """Build causal masks inside each document; every token sees itself at least."""
        distance = query_position[:, None] - key_position[None, :]
        same = query_document[:, :, None] == key_document[:, None, :]
        full = (same & (distance >= 0)) | (distance == 0)
        sliding = full & (distance < window)
        return Masks(full.unsqueeze(1), sliding.unsqueeze(1))

    def additive(self, dtype: torch.dtype) -> "Masks":
        """Return the masks as attention adds them to its scores: zero, or minus infinity.

        Attention turns boolean masks into these itself, but a copy for every head.
        """
        return Masks(_additive(self.full, dtype), _additive(self.sliding, dtype))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


class KeyValueCache:
    """Keys and values of one layer, in a buffer of fixed size so that shapes never change."""

    def __init__(self, shape: Shape, rows: int, length: int, like: Tensor) -> None:
        """Allocate room for `length` tokens in each of `rows` sequences."""
        size = (rows, shape.num_key_value_heads, length, shape.head_dim)
        self.keys = torch.zeros(size, device=like.device, dtype=like.dtype)
        self.values = torch.zeros(size, device=like.device, dtype=like.dtype)

    def update(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values at `start`; return the whole buffers."""
        end = start + keys.shape[2]
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys, self.values


class Weight(nn.Module):
    """A weight under the name the checkpoint gives it: `<module>.weight`."""

    def __init__(self, *size: int, std: float = 0.0) -> None:
        """Draw it from N(0, std)."""
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*size) * std)


class Attention(nn.Module):
    """o = (rms(attention(rope(rms(q)), rope(rms(k)), v)) * sigmoid(g)) Wo"""

    def __init__(self, shape: Shape, *, rotary: bool) -> None:
        """Set up one layer; `rotary` is false for full attention."""
        super().__init__()
        hidden = shape.hidden_size
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        std = hidden**-0.5
        self.shape = shape
        self.rotary = rotary
        self.q_proj = Weight(queries, hidden, std=std)
        self.k_proj = Weight(keys, hidden, std=std)
        self.v_proj = Weight(keys, hidden, std=std)
        self.gate_proj = Weight(queries, hidden, std=std / 2)
        self.o_proj = Weight(hidden, queries, std=queries**-0.5)

    def forward(
        self,
        x: Tensor,  # [N, T, D]
        mask: Tensor,  # [N, 1, T, S]
        rotation: tuple[Tensor, Tensor],  # cosines and sines, [T, head_dim / 2]
        cache: KeyValueCache | None,
        start: int,
    ) -> Tensor:
        """Return the branch, [N, T, D]."""
        shape = self.shape
        q = self._heads(x, self.q_proj, shape.num_attention_heads)
        k = self._heads(x, self.k_proj, shape.num_key_value_heads)
        v = self._heads(x, self.v_proj, shape.num_key_value_heads)
        gate = torch.sigmoid(F.linear(x, self.gate_proj.weight).float())
        q, k = rms(q, shape.rms_norm_eps), rms(k, shape.rms_norm_eps)
        if self.rotary:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            k, v = cache.update(k, v, start)
        groups = shape.num_attention_heads // shape.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scale = shape.head_dim**-0.5 * shape.qk_scale_factor
        mask = mask.expand(-1, shape.num_attention_heads, -1, -1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        o = rms(o, shape.rms_norm_eps).transpose(1, 2).flatten(2)
        return F.linear(o * gate, self.o_proj.weight)

    def _heads(self, x: Tensor, projection: Weight, heads: int) -> Tensor:
        y = F.linear(x, projection.weight)
        return y.unflatten(-1, (heads, self.shape.head_dim)).transpose(1, 2)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of each head against each other by the position's angles."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Router(nn.Module):
    """p = sigmoid(z); the K largest of p + bias are chosen and weighted by p / sum(p)."""

    e_score_correction_bias: Tensor

    def __init__(self, shape: Shape) -> None:
        """Start with router logits of unit size and no bias."""
        super().__init__()
        self.shape = shape
        std = shape.hidden_size**-0.5 / shape.output_multiplier
        size = (shape.num_local_experts, shape.hidden_size)
        self.weight = nn.Parameter(torch.randn(size) * std)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.num_local_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return route weights and choices, both [tokens, E] and zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight * self.shape.output_multiplier)
        p = torch.sigmoid(logits)
        biased = p.detach() + self.e_score_correction_bias
        best = biased.topk(self.shape.num_experts_per_tok, -1).indices
        chosen = torch.zeros_like(p).scatter_(1, best, 1.0)
        weights = p * chosen
        return weights / (weights.sum(-1, keepdim=True) + 1e-15), chosen


class Experts(nn.Module):
    """Every expert's gated unit for every token, normed and summed with the routes' weights."""

    def __init__(self, shape: Shape) -> None:
        """Gate rows come first in `gate_up_proj`, then up rows."""
        super().__init__()
        self.shape = shape
        experts, width = shape.num_local_experts, shape.moe_hidden_size
        inner = shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, width) * width**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, width, inner) * inner**-0.5)
        self.post_expert_norm = Weight(width)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Map [tokens, H] and route weights [tokens, E] to [tokens, H]."""
        experts = self.shape.num_local_experts
        gate_up = F.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts, 2, -1))
        gate, up = gate_up.float().unbind(2)  # [tokens, E, I]
        inner = (F.silu(gate) * up).to(gate_up.dtype).transpose(0, 1)
        y = torch.matmul(inner, self.down_proj.transpose(1, 2))  # [E, tokens, H]
        y = rms(y.float() * (1 + self.post_expert_norm.weight), self.shape.post_norm_eps)
        return (y * weights.t().unsqueeze(-1)).sum(0)


class MixtureOfExperts(nn.Module):
    """Pool to the experts' width, norm, experts, and back."""

    def __init__(self, shape: Shape) -> None:
        """Set up router, projections and experts."""
        super().__init__()
        hidden, width = shape.hidden_size, shape.moe_hidden_size
        self.eps = shape.rms_norm_eps
        self.gate = Router(shape)
        self.pre_expert_proj = Weight(width, hidden, std=hidden**-0.5)
        self.pre_expert_norm = Weight(width)
        self.experts = Experts(shape)
        self.post_expert_proj = Weight(hidden, width, std=width**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the branch [N, T, D] and the experts chosen [N, T, E]."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens)
        h = rms(F.linear(tokens, self.pre_expert_proj.weight), self.eps)
        m = self.experts(h * (1 + self.pre_expert_norm.weight), weights)
        branch = F.linear(m, self.post_expert_proj.weight)
        return branch.view_as(x), chosen.view(*x.shape[:2], -1)


class ResidualGate(nn.Module):
    """s = alpha * s + beta * branch, per channel, with alpha^2 + beta^2 = 1."""

    def __init__(self, shape: Shape, start: float) -> None:
        """Start every channel at the same gate."""
        super().__init__()
        self.temperature = shape.residual_gate_temperature
        self.gate = nn.Parameter(torch.full((shape.hidden_size,), start))

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        """Blend a normed branch into the stream."""
        u = self.gate.float() / self.temperature
        beta = torch.sigmoid(u)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-u) * (1 + beta), min=1e-3))
        return alpha * stream + beta * branch


class Layer(nn.Module):
    """One decoder layer: attention, then experts, each blended into the stream."""

    def __init__(self, shape: Shape, index: int, gate_start: float) -> None:
        """Centred and weight-first norms start at zero, which is no scale at all."""
        super().__init__()
        self.full = shape.is_full(index)
        self.eps, self.post_eps = shape.rms_norm_eps, shape.post_norm_eps
        self.input_layernorm = Weight(shape.hidden_size)
        self.self_attn = Attention(shape, rotary=not self.full)
        self.post_attention_residual_gate = ResidualGate(shape, gate_start)
        self.pre_feedforward_layernorm = Weight(shape.hidden_size)
        self.mlp = MixtureOfExperts(shape)
        self.post_feedforward_layernorm = Weight(shape.hidden_size)
        self.post_feedforward_residual_gate = ResidualGate(shape, gate_start)

    def forward(
        self,
        s: Tensor,  # [N, T, D] float32
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: KeyValueCache | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return the stream and the experts chosen."""
        a = rms(s, self.eps) * (1 + self.input_layernorm.weight)
        b = self.self_attn(a, mask, rotation, cache, start)
        s = self.post_attention_residual_gate(s, rms(b, self.post_eps))
        f = rms(s, self.eps) * (1 + self.pre_feedforward_layernorm.weight)
        b, chosen = self.mlp(f)
        b = rms(b.float() * (1 + self.post_feedforward_layernorm.weight), self.post_eps)
        return self.post_feedforward_residual_gate(s, b), chosen


class Decoder(nn.Module):
    """Token ids to logits."""

    def __init__(self, shape: Shape, recipe: Recipe) -> None:
        """Draw initial weights from torch's generator."""
        super().__init__()
        self.shape = shape
        self.embed_tokens = Weight(shape.vocab_size, shape.hidden_size, std=0.1)
        self.layers = nn.ModuleList(
            Layer(shape, i, recipe.residual_gate_init) for i in range(shape.num_hidden_layers)
        )
        self.norm = Weight(shape.hidden_size)
        nn.init.ones_(self.norm.weight)
        self.lm_head = Weight(shape.vocab_size, shape.hidden_size, std=0.02)

    def routers(self) -> list[Router]:
        """Every layer's router, in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(
        self,
        ids: Tensor,  # [N, T]
        masks: Masks,
        positions: Tensor,  # [T]
        caches: list[KeyValueCache] | None = None,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return logits [N, T, V] (or [N, 1, V]) and each layer's chosen experts."""
        shape = self.shape
        start = 0 if caches is None else int(positions[0])
        rotation = self._rotation(positions)
        s = rms(F.embedding(ids, self.embed_tokens.weight), shape.rms_norm_eps)
        choices = []
        for i, layer in enumerate(self.layers):
            mask = masks.full if layer.full else masks.sliding
            cache = None if caches is None else caches[i]
            s, chosen = layer(s, mask, rotation, cache, start)
            choices.append(chosen)
        if last_only:
            s = s[:, -1:]
        x = rms(s, shape.rms_norm_eps) * self.norm.weight
        z = F.linear(x, self.lm_head.weight).float() * shape.output_multiplier
        return shape.final_logit_softcapping * torch.tanh(
            z / shape.final_logit_softcapping
        ), choices

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(0, self.shape.head_dim, 2, device=positions.device)
        frequencies = self.shape.rope_theta ** (-pairs.float() / self.shape.head_dim)
        angles = positions.float()[:, None] * frequencies
        return angles.cos(), angles.sin()
