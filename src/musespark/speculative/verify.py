"""Which guessed tokens stay, so that what comes out is distributed as the target alone has it.

With p_i the target's distribution and q_i the draft's behind i guessed tokens x_1 ... x_i:

    token by token (arXiv 2211.17192):  x_i stays with probability min(1, p(x_i) / q(x_i)),
        p and q behind x_1 ... x_(i-1); the first one that does not ends the guess.
    as a block (arXiv 2403.10444):      r_0 = 1,  r_i = min(1, r_(i-1) p(x_i) / q(x_i));
        the longest prefix stays whose own draw succeeds, with probability h_i:
        h_i = s_i / (s_i + 1 - r_i),  s_i = sum max(r_i p_i - q_i, 0);  h_i = r_i at the end.

Then one more token is drawn, from max(r p - q, 0) behind the part that stays (r = 1 token by
token), or from p if all of it stays. A block keeps at least as many tokens on average.

Both are exact if how many tokens are guessed may depend on the earlier ones only: whether x_i is
verified must not depend on x_i itself.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from musespark.ops.sample import sample_from_weights

Verification = Literal["block", "token"]


class Verified(NamedTuple):
    """For S sequences."""

    num_accepted: Tensor
    """[S] int64 guessed tokens that stay."""
    token_ids: Tensor
    """[S] int64 the token behind them."""


def verify_drafts(
    target: Tensor,
    draft: Tensor,
    token_ids: Tensor,
    widths: Tensor,
    accept: Tensor,
    final: Tensor,
    method: Verification = "block",
) -> Verified:
    """Accept or reject guessed tokens.

    Args:
        target: [S, N + 1, V] float32 the target's probabilities behind 0 to N guessed tokens.
        draft: [S, N, V] float32 those that each guessed token was drawn from.
        token_ids: [S, N] int64 guessed tokens.
        widths: [S] int64 how many of them count; what is behind means nothing.
        accept: [S, N] float64 uniform random numbers, one to accept each guessed token.
        final: [S, N + 1] float64, one to draw the token behind 0 to N of them.
        method: how to verify.
    """
    num_guessed = token_ids.shape[1]
    place = torch.arange(num_guessed, device=token_ids.device)
    index = token_ids[..., None]
    p = target[:, :num_guessed].gather(2, index)[..., 0].double()  # [S, N]
    q = draft.gather(2, index)[..., 0].double()
    if method == "token":
        kept = (accept * q < p) & (place < widths[:, None])
        num_accepted = kept.cumprod(dim=1).sum(dim=1)
        share = torch.ones_like(final[:, 0])
    else:
        num_accepted, share = _verify_block(target, draft, p / q, widths, accept)
    row = torch.arange(len(target), device=target.device)
    behind = target[row, num_accepted]  # [S, V]
    guessed = draft[row, num_accepted.clamp(max=max(0, num_guessed - 1))]
    rest = (share[:, None] * behind - guessed).clamp_min_(0)
    # The same distribution twice leaves nothing, and is never rejected but for rounding.
    is_whole = (num_accepted == widths) | (rest.sum(dim=-1) == 0)
    weights = torch.where(is_whole[:, None], behind.double(), rest)
    drawn = sample_from_weights(weights, final.gather(1, num_accepted[:, None])[:, 0])
    return Verified(num_accepted, drawn)


def _verify_block(
    target: Tensor, draft: Tensor, ratio: Tensor, widths: Tensor, accept: Tensor
) -> tuple[Tensor, Tensor]:
    """(accepted tokens [S], r behind them [S] float64); `ratio` [S, N] is p(x_i) / q(x_i)."""
    num_guessed = ratio.shape[1]
    running = torch.ones_like(ratio[:, 0])
    num_accepted, share = torch.zeros_like(widths), running
    for count in range(1, num_guessed + 1):
        running = (running * ratio[:, count - 1]).clamp_max(1)
        chance = running
        if count < num_guessed:
            left = (running[:, None] * target[:, count] - draft[:, count]).clamp_min_(0).sum(dim=-1)
            whole = left + 1 - running
            chance = torch.where(count < widths, torch.where(whole > 0, left / whole, 1.0), running)
        accepted = (accept[:, count - 1] < chance) & (count <= widths)
        num_accepted = torch.where(accepted, count, num_accepted)
        share = torch.where(accepted, running, share)
    return num_accepted, share
