"""A DSpark draft straight from its checkpoint's tensors and JSON, in float64, without a cache.

Context rows and block rows of one sequence meet in one attention with an explicit mask, heads are
rotated by adjacent pairs as the rows are stored, and tokens are drawn one by one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


def rms(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate_pairs(x, positions, theta):
    """x [T, heads, head_dim]: (x0, x1), (x2, x3), ... turn by position * theta^(-2i / head_dim)."""
    half = x.shape[-1] // 2
    angle = positions[:, None].to(F64) * theta ** (-torch.arange(half, dtype=F64) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@dataclass
class Proposed:
    token_ids: list[int]
    logits: Tensor
    confidences: Tensor


class ReferenceDraft:
    """One sequence at a time."""

    def __init__(self, fields: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor):
        self.f = fields
        self.w = {k: v if v.dtype == torch.int64 else v.to(F64) for k, v in tensors.items()}
        self.embedding = embedding.to(F64)

    def norm(self, x, name, centre):
        x = rms(x, self.f["rms_norm_eps"])
        if name not in self.w:
            return x
        return x * (self.w[name] + (centre if self.f["norm_zero_centered_gamma"] else 0))

    def post(self, branch, name, residual_index, weight_first):
        eps = self.f.get("rms_post_norm_eps") or self.f["rms_norm_eps"]
        if name not in self.w:
            return rms(branch, eps)
        centre = {"one": 1, "zero": 0, "inverse_residual_index": 1 / residual_index}[
            self.f["post_norm_gain_center_type"]
        ]
        gain = self.w[name] + (centre if self.f["norm_zero_centered_gamma"] else 0)
        return rms(branch * gain, eps) if weight_first else rms(branch, eps) * gain

    def add(self, stream, branch, name):
        if not self.f["use_residual_gate"]:
            return stream + branch
        beta = torch.sigmoid(self.w[name] / 0.3)
        return (1 - beta.square()).clamp_min(1e-3).sqrt() * stream + beta * branch

    def rotary(self, layer):
        f = self.f
        uses = (
            f["use_rope"] if f.get("use_rope") is not None else f["draft_position_mode"] == "rope"
        )
        every = f.get("every_n_layers_nope")
        return uses and not (every and (f["num_hidden_layers"] - 1 - layer) % every == 0)

    def window(self, layer):
        f, windows = self.f, self.f.get("global_attn_cfg") or [0]
        every = f.get("every_n_layers_nope")
        if every:
            layer += every - f["num_hidden_layers"] % every
        return windows[layer % len(windows)]

    def attention(self, layer, block, context, positions):
        """block: normed rows; context: hidden rows before the layer's norm."""
        f, p = self.f, f"layers.{layer}.self_attn."
        heads, kv_heads, dim = f["num_attention_heads"], f["num_key_value_heads"], f["head_dim"]
        normed = self.norm(context, f"{p}pre_qkv_proj_norm.weight", 1)
        rows = torch.cat((normed, block))
        query = (block @ self.w[f"{p}q_proj.weight"].T).unflatten(-1, (heads, dim))
        key = (rows @ self.w[f"{p}k_proj.weight"].T).unflatten(-1, (kv_heads, dim))
        value = (rows @ self.w[f"{p}v_proj.weight"].T).unflatten(-1, (kv_heads, dim))
        own = positions[len(context) :]
        scale = 1 / math.sqrt(dim)
        if f["use_qk_norm"]:
            query, key = rms(query, f["rms_norm_eps"]), rms(key, f["rms_norm_eps"])
            scale *= 3.87 if f["use_sqrt_attn_scaling"] else 43.7840518911 / math.sqrt(dim)
        window = self.window(layer)
        if f.get("attn_temperature_tuning_layers") == "global" and not window:
            floor = f["attn_temperature_tuning_floor_scale"]
            growth = torch.log((own.to(F64) + 1) / floor)
            growth = growth * f["attn_temperature_tuning_q_scale_constant"]
            query = query * (growth + 1).clamp_min(1)[:, None, None]
        if self.rotary(layer):
            query = rotate_pairs(query, own, f["rope_theta"])
            key = rotate_pairs(key, positions, f["rope_theta"])
        seen = positions[None] <= own[:, None]
        if not f.get("causal", True):
            seen |= positions[None] >= own[0]
        if window:
            seen &= positions[None] > own[:, None] - window
        out = torch.empty_like(query)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = query[:, head] @ key[:, shared].T * scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[:, head] = weights @ value[:, shared]
        if f["use_attn_o_norm"]:
            out = rms(out, f["rms_norm_eps"])
        if f["use_attn_o_gate"]:
            gate = block @ self.w[f"{p}o_gate_proj.weight"].T
            out = out * torch.sigmoid(gate).unflatten(-1, (heads, dim))
        return out.flatten(1) @ self.w[f"{p}o_proj.weight"].T

    def hidden(self, anchor, taps, num_tokens):
        f = self.f
        context = rms(torch.cat(taps, -1).to(F64) @ self.w["fc.weight"].T, f["rms_norm_eps"])
        context = context * self.w["hidden_norm.weight"]
        rows = num_tokens + (not f.get("sample_from_anchor", True))
        ids = torch.tensor([anchor, *[f["mask_token_id"]] * (rows - 1)])
        positions = torch.arange(len(context) + rows)
        s = self.embedding[ids]
        for layer in range(f["num_hidden_layers"]):
            p = f"layers.{layer}."
            normed = self.norm(s, f"{p}self_attn.pre_qkv_proj_norm.weight", 1)
            branch = self.attention(layer, normed, context, positions)
            branch = self.post(branch, f"{p}post_attn_norm.weight", 2 * layer + 1, False)
            s = self.add(s, branch, f"{p}add_attn.gate")
            normed = self.norm(s, f"{p}pre_ffn_norm.weight", 1)
            gate, up = (
                normed @ self.w[f"{p}feed_forward.{name}_proj.weight"].T for name in ("gate", "up")
            )
            branch = (gate * torch.sigmoid(gate) * up) @ self.w[
                f"{p}feed_forward.down_proj.weight"
            ].T
            first = f["use_ffn_learnable_scales"]
            branch = self.post(branch, f"{p}post_ffn_norm.weight", 2 * layer + 2, first)
            s = self.add(s, branch, f"{p}add_ffn.gate")
        centre = {"one": 1, "zero": 0}[f["output_norm_gain_center_type"]]
        return self.norm(s, "norm.weight", centre)[rows - num_tokens :]

    def propose(self, anchor, taps, num_tokens):
        """taps: one [T, D] per tapped layer, of all tokens before the anchor."""
        f, hidden = self.f, self.hidden(anchor, taps, num_tokens)
        multiplier = 1.0
        if (f.get("metap") or {}).get("use_metap"):
            ratio = f["hidden_size"] / f["metap"]["base_width"]
            multiplier = 1 / ratio if f["metap"]["metap_mode"] == "mup" else 1 / math.sqrt(ratio)
        cap, previous = f.get("output_soft_cap_temp"), anchor
        tokens, logits, confidences = [], [], []
        for row in hidden:
            scores, features = row @ self.w["lm_head.weight"].T, row
            if f["markov_rank"]:
                embedded = self.w["markov_head.markov_w1.weight"][previous]
                scores = scores + embedded @ self.w["markov_head.markov_w2.weight"].T
                if f.get("confidence_head_with_markov"):
                    features = torch.cat((row, embedded))
            scores = scores * multiplier
            logits.append(cap * torch.tanh(scores / cap) if cap else scores)
            if f["enable_confidence_head"]:
                confidence = features @ self.w["confidence_head.proj.weight"][0]
                bias = self.w["confidence_head.proj.bias"]
                confidences.append(torch.sigmoid(confidence + bias))
            picked = int(logits[-1].argmax())
            previous = picked + int(self.w["d2t"][picked])
            tokens.append(previous)
        stacked = torch.cat(confidences) if confidences else torch.ones(num_tokens)
        return Proposed(tokens, torch.stack(logits), stacked)
