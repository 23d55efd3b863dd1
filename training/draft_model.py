"""A DSpark draft to train: some conversations, and many blocks of each, at once.

Parameters carry the names and the shapes of a draft's checkpoint, so exporting is a matter of
dtypes. Weights are float32; run it under bfloat16 autocast on a GPU.

Dimensions: N conversations of a batch, T their tokens, A blocks of each, P places of a block,
D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import SPARK_MINI
from training.draft_config import DraftRecipe, DraftShape
from training.model import ResidualGate, Weight, rms

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines."""


@dataclass(frozen=True)
class Blocks:
    """Where a step's blocks begin, and what stands there."""

    anchors: Tensor
    """[N, A] positions of the anchors in their conversations."""
    tokens: Tensor
    """[N, A, P] the conversation's tokens from each anchor on: what precedes each proposal."""


@dataclass(frozen=True)
class DraftOutput:
    """What the draft says of every place of every block."""

    logits: Tensor
    """[N, A, P, V] float32, Markov bias and soft cap included."""
    confidence: Tensor
    """[N, A, P] float32 before the sigmoid."""


class Linear(Weight):
    """y = x W^T."""

    def __init__(self, inputs: int, outputs: int, *, std: float | None = None) -> None:
        """Draw the weight for outputs of unit size, unless told otherwise."""
        super().__init__(outputs, inputs, std=inputs**-0.5 if std is None else std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight)


def rotate_pairs(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn adjacent pairs of each head by the positions' angles; x [N, S, heads, head_dim]."""
    cos, sin = rotation
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


@dataclass(frozen=True)
class Positions:
    """Where context and blocks stand, and what blocks see of the context."""

    context: Rotation
    """Of the context's positions, [1, T, 1, head_dim / 2]."""
    blocks: Rotation
    """Of the blocks', [N, A * P, 1, head_dim / 2]."""
    hidden: Tensor
    """[N, 1, A, P, T] bool, true where a place does not see a token."""


class DraftAttention(nn.Module):
    """Keys and values of the context and of the blocks; queries of the blocks alone."""

    def __init__(self, shape: DraftShape) -> None:
        """Set up one layer's attention."""
        super().__init__()
        hidden = shape.hidden_size
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.shape = shape
        self.pre_qkv_proj_norm = Weight(hidden)
        self.q_proj = Linear(hidden, queries)
        self.k_proj = Linear(hidden, keys)
        self.v_proj = Linear(hidden, keys)
        self.o_gate_proj = Linear(hidden, queries, std=hidden**-0.5 / 2)
        self.o_proj = Linear(queries, hidden)

    def forward(self, stream: Tensor, context: Tensor, positions: Positions) -> Tensor:
        """Return the branch [N, A * P, D]; stream [N, A * P, D], context [N, T, D]."""
        eps, gain = self.shape.rms_norm_eps, 1 + self.pre_qkv_proj_norm.weight
        block = rms(stream, eps) * gain
        far_key, far_value = self._keys(rms(context, eps) * gain, positions.context)
        key, value = self._keys(block, positions.blocks)
        query = self._rotated(self.q_proj(block), positions.blocks)
        o = self._attend(query, far_key, far_value, key, value, positions.hidden)
        o = rms(o, eps).flatten(2)
        return self.o_proj(o * torch.sigmoid(self.o_gate_proj(block).float()))

    def _keys(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        value = self.v_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        return self._rotated(self.k_proj(x), rotation), value

    def _rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        heads = rms(x.unflatten(-1, (-1, self.shape.head_dim)), self.shape.rms_norm_eps)
        return rotate_pairs(heads, rotation).to(x.dtype)

    def _attend(
        self,
        query: Tensor,  # [N, A * P, heads, head_dim]
        far_key: Tensor,  # [N, T, kv_heads, head_dim]
        far_value: Tensor,
        key: Tensor,  # [N, A * P, kv_heads, head_dim]
        value: Tensor,
        hidden: Tensor,  # [N, 1, A, P, T]
    ) -> Tensor:
        """Attend to the context and, within each block, causally to the block itself.

        K key-value heads, each with G query heads: [N, A * P, heads, head_dim].
        """
        N, _, A, P, T = hidden.shape
        K, head_dim = key.shape[2], key.shape[3]
        scale = head_dim**-0.5 * self.shape.qk_scale
        q = query.view(N, A, P, K, -1, head_dim).permute(0, 3, 1, 4, 2, 5)  # [N, K, A, G, P, :]
        near = (N, A, P, K, head_dim)
        k, v = (x.view(near).permute(0, 3, 1, 2, 4)[:, :, :, None] for x in (key, value))
        far_k, far_v = far_key.permute(0, 2, 3, 1), far_value.transpose(1, 2)
        far = (q.flatten(2, 4) @ far_k).view(*q.shape[:5], T).float() * scale
        own = (q @ k.transpose(-1, -2)).float() * scale  # [N, K, A, G, P, P]
        far = far.masked_fill(hidden[:, :, :, None], -torch.inf)
        later = torch.ones(P, P, dtype=torch.bool, device=q.device).triu(1)
        scores = torch.cat((far, own.masked_fill(later, -torch.inf)), -1)
        far_weight, weight = scores.softmax(-1).to(v.dtype).split((T, P), -1)
        o = (far_weight.flatten(2, 4) @ far_v).view(*q.shape) + weight @ v
        return o.permute(0, 2, 4, 1, 3, 5).reshape(N, A * P, -1, head_dim)


class DraftFeedForward(nn.Module):
    """down( silu(gate(x)) * up(x) )."""

    def __init__(self, shape: DraftShape) -> None:
        """Set up one layer's feed-forward network."""
        super().__init__()
        width = int(shape.ffn_dim_multiplier * shape.hidden_size)
        self.gate_proj = Linear(shape.hidden_size, width)
        self.up_proj = Linear(shape.hidden_size, width)
        self.down_proj = Linear(width, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Attention, then the feed-forward network, each blended into the stream."""

    def __init__(self, shape: DraftShape, gate_start: float) -> None:
        """Centred and weight-first norms start at zero, which is no scale at all."""
        super().__init__()
        self.shape = shape
        self.self_attn = DraftAttention(shape)
        self.add_attn = ResidualGate(SPARK_MINI, gate_start)
        self.pre_ffn_norm = Weight(shape.hidden_size)
        self.feed_forward = DraftFeedForward(shape)
        self.post_ffn_norm = Weight(shape.hidden_size)
        self.add_ffn = ResidualGate(SPARK_MINI, gate_start)

    def forward(self, s: Tensor, context: Tensor, positions: Positions) -> Tensor:
        """Return the stream."""
        eps, post_eps = self.shape.rms_norm_eps, self.shape.rms_post_norm_eps
        branch = self.self_attn(s, context, positions)
        s = self.add_attn(s, rms(branch, post_eps))
        branch = self.feed_forward(rms(s, eps) * (1 + self.pre_ffn_norm.weight))
        branch = branch.float() * (1 + self.post_ffn_norm.weight)
        return self.add_ffn(s, rms(branch, post_eps))


class MarkovHead(nn.Module):
    """w2(w1[token before])."""

    def __init__(self, shape: DraftShape, vocab_size: int) -> None:
        """Start without a bias."""
        super().__init__()
        self.markov_w1 = Weight(vocab_size, shape.markov_rank, std=1.0)
        self.markov_w2 = Linear(shape.markov_rank, vocab_size, std=0.0)


class ConfidenceHead(nn.Module):
    """proj([hidden, w1[token before]])."""

    def __init__(self, width: int) -> None:
        """Start undecided."""
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.zeros_(self.proj.weight)


class Draft(nn.Module):
    """Hidden states of the target to logits of blocks."""

    embedding: Tensor

    def __init__(
        self, shape: DraftShape, recipe: DraftRecipe, embedding: Tensor, lm_head: Tensor
    ) -> None:
        """Draw initial weights from torch's generator.

        `embedding` and `lm_head` [V, D] are the target's; the output layer begins as its copy.
        """
        super().__init__()
        self.shape = shape
        vocab_size = SPARK_MINI.vocab_size
        width = len(shape.target_layer_ids) * SPARK_MINI.hidden_size
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.fc = Linear(width, shape.hidden_size)
        self.hidden_norm = Weight(shape.hidden_size)
        self.layers = nn.ModuleList(
            DraftLayer(shape, recipe.residual_gate_init) for _ in range(shape.num_hidden_layers)
        )
        self.norm = Weight(shape.hidden_size)
        self.lm_head = Linear(shape.hidden_size, vocab_size)
        self.markov_head = MarkovHead(shape, vocab_size)
        self.confidence_head = ConfidenceHead(shape.hidden_size + shape.markov_rank)
        nn.init.ones_(self.hidden_norm.weight)
        nn.init.ones_(self.norm.weight)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head)

    def forward(self, taps: Tensor, blocks: Blocks) -> DraftOutput:
        """Say what every place of every block proposes.

        taps: [N, T, taps * D] the tapped streams side by side.
        """
        shape = self.shape
        N, A, P = blocks.tokens.shape
        context = self.fc(taps.to(self.fc.weight.dtype))
        context = rms(context, shape.rms_norm_eps) * self.hidden_norm.weight
        ids = blocks.tokens.new_full((N, A, P), shape.mask_token_id)
        ids[:, :, 0] = blocks.tokens[:, :, 0]
        s = F.embedding(ids.flatten(1), self.embedding).float()
        positions = self._positions(taps.shape[1], blocks)
        for layer in self.layers:
            s = layer(s, context, positions)
        hidden = rms(s, shape.rms_norm_eps) * self.norm.weight
        embedded = F.embedding(blocks.tokens, self.markov_head.markov_w1.weight)
        scores = self.lm_head(hidden).float().unflatten(1, (A, P))
        scores = scores + self.markov_head.markov_w2(embedded).float()
        cap = shape.output_soft_cap_temp
        logits = cap * torch.tanh(scores * (shape.output_multiplier / cap))
        features = torch.cat((hidden.unflatten(1, (A, P)), embedded), -1)
        with torch.autocast(features.device.type, enabled=False):
            confidence = self.confidence_head.proj(features.float()).squeeze(-1)
        return DraftOutput(logits, confidence)

    def _positions(self, length: int, blocks: Blocks) -> Positions:
        places = torch.arange(blocks.tokens.shape[2], device=blocks.anchors.device)
        key = torch.arange(length, device=blocks.anchors.device)
        at = blocks.anchors[:, :, None] + places  # [N, A, P]
        seen = (key < blocks.anchors[:, :, None, None]) & (key > at[..., None] - self.shape.window)
        return Positions(self._rotation(key[None]), self._rotation(at.flatten(1)), ~seen[:, None])

    def _rotation(self, positions: Tensor) -> Rotation:
        """[N, S] positions -> [N, S, 1, head_dim / 2]."""
        pairs = torch.arange(0, self.shape.head_dim, 2, device=positions.device)
        frequencies = self.shape.rope_theta ** (-pairs.float() / self.shape.head_dim)
        angles = positions.float()[:, :, None, None] * frequencies
        return angles.cos(), angles.sin()
