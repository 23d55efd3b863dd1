"""Choice of experts and their weights.

    p   = sigmoid(z)  (or softmax(z))
    ids = top K of (p + bias), in descending order, equal scores: the lowest expert id first
    w   = p[ids] / (sum(p[ids]) + 1e-15) * scale

The bias selects and never weights. A padding row gets id -1 and weight 0: it touches no expert.
"""

import torch
from torch import Tensor

from musespark.ops.router_gemm import router_gemm, router_gemm_triton
from musespark.ops.triton_import import (
    launch_early,
    next_power_of_2,
    tl,
    triton,
    wait_for_inputs,
)

# In no config file; fixed by the released model's implementation.
DIVISION_EPS = 1e-15


def route_topk(
    router_logits: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    *,
    scoring: str = "sigmoid",
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Select `top_k` experts per token.

    Args:
        router_logits: [T, E] float32.
        bias: [E] float32, added to the scores for the selection only.
        top_k: experts per token, at most E.
        scale: the routed scaling factor.
        scoring: "sigmoid" or "softmax".
        padding: [T] bool, True for rows that are no tokens; None: none are.

    Returns:
        (weights [T, K] float32, ids [T, K] int64), in descending order of the biased score.
    """
    scores = torch.sigmoid(router_logits) if scoring == "sigmoid" else router_logits.softmax(-1)
    # A stable sort keeps equal scores in order of their ids; topk promises no order among them.
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + DIVISION_EPS)
    if scale != 1.0:
        weights = weights * scale
    if padding is not None:
        ids = ids.masked_fill(padding[:, None], -1)
        weights = weights.masked_fill(padding[:, None], 0.0)
    return weights, ids


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    *,
    scoring: str = "sigmoid",
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Router product and choice: x [T, D], weight [E, D] float32; the rest as `route_topk`."""
    logits = router_gemm(x, weight)
    return route_topk(logits, bias, top_k, scale, scoring=scoring, padding=padding)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    parts_ptr,
    bias_ptr,
    padding_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    num_experts,
    scale,
    division_eps,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One token per program: its logits are summed over the parts, then the K best are taken.

    Score and id are packed into one integer that orders like (score, -id), so that the maximum is
    the best score's lowest id.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    inside = expert < num_experts
    part = tl.arange(0, BLOCK_P)[:, None]
    bias = tl.load(bias_ptr + expert, inside, other=0.0)
    wait_for_inputs()
    place = (part * num_tokens + token).to(tl.int64) * num_experts + expert[None, :]
    logits = tl.sum(tl.load(parts_ptr + place, (part < PARTS) & inside[None, :], other=0.0), axis=0)
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(inside, logits, -float("inf"))
        scores = tl.exp(logits - tl.max(logits))
        scores /= tl.sum(scores)
    biased = scores + bias
    bits = biased.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    LOWEST: tl.constexpr = -(2**62)
    keys = tl.where(inside, (ordered << 16) | (BLOCK_E - 1 - expert), LOWEST)
    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int64)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    total = 0.0
    for k in tl.static_range(TOP_K):
        best = tl.max(keys)
        chosen = keys == best
        score = tl.sum(tl.where(chosen, scores, 0.0))
        keys = tl.where(chosen, LOWEST, keys)
        ids = tl.where(slot == k, BLOCK_E - 1 - (best & 0xFFFF), ids)
        weights = tl.where(slot == k, score, weights)
        total += score
    weights = weights / (total + division_eps) * scale
    if HAS_PADDING:
        is_padding = tl.load(padding_ptr + token) != 0
        ids = tl.where(is_padding, -1, ids)
        weights = tl.where(is_padding, 0.0, weights)
    out = token.to(tl.int64) * TOP_K + slot
    tl.store(weights_ptr + out, weights, slot < TOP_K)
    tl.store(ids_ptr + out, ids, slot < TOP_K)


def route_topk_triton(
    logit_parts: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    *,
    scoring: str = "sigmoid",
    padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route_topk` as one kernel, of logits [S, T, E] float32 to be summed over S."""
    parts, num_tokens, num_experts = logit_parts.shape
    assert top_k <= num_experts <= 2**16
    device = logit_parts.device
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logit_parts,
            bias,
            padding,
            weights,
            ids,
            num_tokens,
            num_experts,
            scale,
            DIVISION_EPS,
            TOP_K=top_k,
            PARTS=parts,
            SIGMOID=scoring == "sigmoid",
            HAS_PADDING=padding is not None,
            BLOCK_P=next_power_of_2(parts),
            BLOCK_K=next_power_of_2(top_k),
            BLOCK_E=next_power_of_2(num_experts),
            num_warps=4 if parts > 4 else 1,
            **launch_early(device, num_tokens),
        )
    return weights, ids


def route_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    *,
    scoring: str = "sigmoid",
    padding: Tensor | None = None,
    planes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` as two kernels; `planes` as for `router_gemm_triton`."""
    is_bfloat16 = x.dtype == torch.bfloat16
    parts = router_gemm_triton(x, weight, planes) if is_bfloat16 else router_gemm(x, weight)[None]
    return route_topk_triton(parts, bias, top_k, scale, scoring=scoring, padding=padding)
