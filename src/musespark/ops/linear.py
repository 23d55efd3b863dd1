"""Matrix products with weights packed once, at load.

On a CPU, products through plain weights repack the weight on every call, which for few tokens
costs more than the product. oneDNN's own layout, made once, removes that. With it a row's result
also does not depend on how many other rows there are. Elsewhere weights stay as they are; on a
Hopper GPU, `skinny_linear` multiplies a few tokens.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from musespark.ops import skinny_linear
from musespark.ops.precision import wide_dtype

MatMul = Callable[[Tensor], Tensor]


def bfloat16_is_fast() -> bool:
    """Whether this CPU multiplies bfloat16 matrices with oneDNN."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def can_pack(weight: Tensor) -> bool:
    """Whether `pack_linear` has a faster layout for this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and bfloat16_is_fast())


def linear(weight: Tensor) -> MatMul:
    """x [..., in] -> x @ weight.T [..., out], reading `weight` [out, in] at each call."""
    if not skinny_linear.takes(weight):
        return lambda x: F.linear(x, weight)

    def matmul(x: Tensor) -> Tensor:
        if x.dim() == 2 and x.shape[0] <= skinny_linear.MAX_TOKENS:
            return skinny_linear.skinny_linear_triton(x, weight)
        return F.linear(x, weight)

    return matmul


def pack_linear(weight: Tensor) -> MatMul:
    """Like `linear`, over a packed copy of `weight`, which may then be freed."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def wide_linear(weight: Tensor) -> MatMul:
    """Like `linear`, with the accumulator handed out in float32 instead of rounded."""
    wide = wide_dtype(weight.dtype)
    if weight.dtype == wide:
        return linear(weight)
    if weight.device.type == "cuda":
        return lambda x: torch.mm(x, weight.t(), out_dtype=wide)
    return lambda x: F.linear(x.to(wide), weight.to(wide))


def pack_wide_linear(weight: Tensor) -> MatMul:
    """Like `wide_linear`, over a packed copy of `weight`.

    oneDNN rounds a bfloat16 product on its way out, so it runs twice: the second run subtracts
    the first one's rounded result from its own accumulator. Together they carry 16 bits, at twice
    the time and none of the memory of a float32 copy of the weight.
    """
    if weight.dtype == wide_dtype(weight.dtype):
        return pack_linear(weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    mkldnn = torch.ops.mkldnn

    def matmul(x: Tensor) -> Tensor:
        rounded = mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        rest = mkldnn._linear_pointwise.binary(x, rounded, packed, None, "sub")
        return rounded.float().add_(rest)

    return matmul
