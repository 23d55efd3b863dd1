"""QK-norm without a weight, then rotary embedding (or none), on heads as the projections give them.

    x = b(rms(x, eps))                         one rounding
    (x1, x2) = halves of x
    x = b([x1 cos - x2 sin, x2 cos + x1 sin])  float32 inside, one rounding

A checkpoint stores each head's rows as [first halves | second halves], so halves rotate. The
query's extra scale is not here: it is folded into the softmax scale.
"""

import torch
from torch import Tensor

from musespark.ops.rms_norm import rms_norm, rms_norm_reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves in float32. x: [T, heads, head_dim]; cos, sin: [T, head_dim / 2]."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def qk_norm_rope_reference(qk: Tensor, eps: float, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """The formulas above. Arguments as for `qk_norm_rope`."""
    normed = rms_norm_reference(qk, None, eps)
    return normed if angles is None else rotate(normed, *angles)


def qk_norm_rope(qk: Tensor, eps: float, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """Norm every head, then rotate it.

    Args:
        qk: [T, heads, head_dim], query and key heads side by side.
        eps: of the norm.
        angles: (cos, sin), each [T, head_dim / 2] float32; None on a layer without RoPE.

    Returns:
        [T, heads, head_dim] in qk's dtype.
    """
    normed = rms_norm(qk, None, eps)
    return normed if angles is None else rotate(normed, *angles)
