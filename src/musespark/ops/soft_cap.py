"""Final logits: scaled, then softly capped.

logits = cap * tanh(multiplier * x / cap)       in float32
"""

import torch
from torch import Tensor

from musespark.ops.triton_import import tl, triton

_BLOCK = 1024


def soft_cap(x: Tensor, multiplier: float, cap: float) -> Tensor:
    """Logits within (-cap, cap).

    Args:
        x: [N, V] float32, the vocabulary projection's output; overwritten.
        multiplier: output multiplier of the config.
        cap: soft cap of the config.
    """
    return torch.tanh(x.mul_(multiplier / cap), out=x).mul_(cap)


@triton.jit
def _tanh(x):
    """To float32's precision: by its series near 0, where 1 - exp would cancel."""
    square = x * x
    series = 1.0 + square * (
        -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
    )
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, x * series, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["size"])
def _soft_cap_kernel(x_ptr, size, factor, cap, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, place < size, other=0.0)
    tl.store(x_ptr + place, cap * _tanh(x * factor), place < size)


def soft_cap_triton(x: Tensor, multiplier: float, cap: float) -> Tensor:
    """`soft_cap` as one kernel; overwrites the contiguous x."""
    assert x.is_contiguous()
    if x.numel():
        grid = (-(-x.numel() // _BLOCK),)
        _soft_cap_kernel[grid](x, x.numel(), multiplier / cap, cap, BLOCK=_BLOCK, num_warps=8)
    return x
